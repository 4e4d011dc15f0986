"""Says what attention costs on a device: measured, predicted for a plan, and where sparse pays."""
