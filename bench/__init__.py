"""What jackfield costs, measured against plain transformers, nnsight and TransformerLens: `python -m bench`.

`turns` lets one process per library take turns, `worker` is such a process, `libraries/` has what each of them times.
`memory` measures peaks, a process each. `numbers` and `report` make the tables of docs/benchmarks.md out of that.
"""
