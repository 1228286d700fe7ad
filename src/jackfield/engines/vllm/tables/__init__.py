"""Edits and captures that are data: vectors and slots of rows in device memory, and one kernel per site."""
