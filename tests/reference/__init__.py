"""The tests' second opinion: what raw hooks see in transformers' eager models, one prompt at a time.

Nothing here imports the library under test. `record` gives every value of every step, `compare` says how far another
engine's value is from it, `edits` does an edit by hand, `mutants` spoils a record in the ways that systems of this
kind have been wrong, and `identities` checks the record itself.
"""
