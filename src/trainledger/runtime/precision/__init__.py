"""What a run computes in: recipes, FP8 by torchao with every cast watched, and loss scaling for fp16."""
