"""What tests share: tiny models, references, and ways to look at generated code."""

# The seed of weights of the tiny models.
SEED = 1234
