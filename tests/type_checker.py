"""What checks annotations and shapes in tests: beartype, to which an int is also a float, as to any type checker."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
