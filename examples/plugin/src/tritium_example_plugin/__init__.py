"""A pass, a fusion and a provider for Tritium, as a third party would write them."""
