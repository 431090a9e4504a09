"""Convert regions of convolutions to the channels-last memory format."""
