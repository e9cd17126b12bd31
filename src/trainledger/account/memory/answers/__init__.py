"""What is asked of memory beside the peak: how far a plan stretches, what a stage holds, what a failed request was."""
