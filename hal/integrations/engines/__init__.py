"""What the plugins of stock serving engines share: versions, refusals, and a model's session."""
