"""What tests share: tiny models, references, and ways to look at generated code."""
