"""The values of the model as a whole."""

from jackfield.values.value import Value


class RootValues:
    """What a model answers for."""

    __slots__ = ()

    input_ids = Value("1 t", "r", "the token ids of this step", on="model", dtype="int64", each_step=True)
    token_embeddings = Value("1 t h", "rw", "the embedding module's output", on="model")
    final_norm_output = Value("1 t h", "rw", "the stream after the last norm", on="model")
    logits = Value("1 1 vocab", "rw", "the row that is sampled from; an edit changes the token", on="model")
    next_token_probabilities = Value("1 vocab", "r", "softmax of the logits", on="model", dtype="float32")
