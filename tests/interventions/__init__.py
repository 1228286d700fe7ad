"""Interventions: what they may say, what they do on every engine, and their JSON."""
