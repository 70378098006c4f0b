"""Quantized formats and their exact arithmetic."""
