"""Mixture of experts: recipes, plans, weights, routing and the op."""
