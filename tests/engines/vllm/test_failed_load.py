"""What a load that fails leaves in its process: nothing that the next one would meet."""

from pathlib import Path

import pytest

import jackfield as jf
from tests import zoo
from tests.engines.vllm.tiny import need_vllm, start, start_folder


@pytest.mark.slow
def test_a_model_with_experts_loads_after_one_that_could_not(tmp_path: Path) -> None:
    """Kills: the groups of a model without experts, that vLLM has left for the next."""
    need_vllm()
    zoo.build("gemma2", hidden_size=128, tie_word_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(jf.UnsupportedModel, match="could not load"):
        start_folder(tmp_path, skip_tokenizer_init=True)
    model = start(zoo.build("mixtral", hidden_size=128), num_gpu_blocks_override=64)
    try:
        assert len(model.run([5, 7, 9], max_tokens=2).token_ids) == 2
    finally:
        model.close()
