"""Keep a pipeline within a budget of device memory."""
