"""Harvests: what captures and probes keep of many prompts, in safetensors files, one after another.

Prompts are drawn, run and written as a stream: what is in memory does not grow with their number. A folder holds
numbered shards and a manifest, which is written after each shard; what the manifest does not name does not count. So a
harvest that ended, however it ended, goes on behind its last shard.

`row_axis` says which rows a prompt gives, `shard` collects them, `folder` writes them, `running` is the stream between,
and `reading` opens what was written.
"""
