"""Anthropic's Messages API on the same models and jobs."""
