"""The search for a recipe: candidates are proposed from recordings, and real images decide within a budget."""
