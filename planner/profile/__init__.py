"""From calibration prompts to a `Profile`: what every candidate of every head costs and loses, layer by layer."""
