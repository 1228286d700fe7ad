"""What jackfield costs an engine that serves, beside plain vLLM and its peers on one machine: `python -m bench.gpu`.

`rows` says what is timed and what it must reach, `scales` how long and how wide, on a GPU and on a CPU. `worker` is a
process of plain vLLM with jackfield beside it (`plain`, `ours`), or of one peer (`peers`); `session` lets them take
turns. `load` is a long mixed load. `report` makes the tables of docs/benchmarks.md out of the numbers.
"""
