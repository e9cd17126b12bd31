"""What other programs write, read into facts: here, the messages in which PyTorch says that memory ran out."""
