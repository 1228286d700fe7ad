"""Edits and captures as plain data, which every engine runs and which have a JSON form.

`kinds` has the eight of them, `rows` what each does to a row, `plan` holds them against a model, `block` and `running`
are them beside a request. Code is the business of `trace`; nothing here runs what a user wrote.
"""
