"""One request's tokens as they come: when it ends, and what its text is.

The rules are vLLM's, so that a completion reads the same from every engine. Engines that choose tokens themselves
push them here; vLLM has its own.
"""

from collections.abc import Sequence
from typing import Final

from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Completion, FinishReason, Logprob, Sampling

CONTEXT: Final = 6  # tokens decoded along, so that a tokenizer that drops a leading space has nothing to drop
UNFINISHED: Final = "\ufffd"  # how decoders show bytes that are no character, or not yet


class Detokenizer:
    """Text out of tokens, a few at a time; the bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(before[-CONTEXT:])
        self._shown = len(self._decoded().rstrip(UNFINISHED))

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._window.extend(token_ids)
        text = self._decoded()
        complete = text.rstrip(UNFINISHED)
        new = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text:
            self._window = self._window[-CONTEXT:]
            self._shown = len(self._decoded())
        return new

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


class Progress:
    """One sample of one request: the tokens so far and, once there is one, the reason it ended.

    `stop_ids` end it: the model's end-of-sequence ids, unless `ignore_eos`, and `stop_token_ids`.
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, eos_ids: frozenset[int], tokenizer: Tokenizer | None
    ) -> None:
        self.sampling = sampling
        self.stop_ids = frozenset(sampling.stop_token_ids) | (eos_ids if not sampling.ignore_eos else set[int]())
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._prompt_token_ids = prompt_token_ids
        self._text = ""
        self._detokenizer = None
        if tokenizer is not None and sampling.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
            )

    def push(self, token_id: int, verdict: FinishReason | None = None) -> None:
        """Adds a token, and ends here if the rules, or before them a `verdict` from outside, say so."""
        self.token_ids.append(token_id)
        ruling = self._ruling(token_id)
        self.finish_reason = verdict or ruling

    def _ruling(self, token_id: int) -> FinishReason | None:
        may_stop = len(self.token_ids) >= self.sampling.min_tokens
        is_stop = may_stop and token_id in self.stop_ids
        if is_stop and not self.sampling.include_stop_str_in_output:
            return "stop"
        if (self.sampling.stop and self._meets_stop(token_id, may_stop)) or is_stop:
            return "stop"
        return "length" if len(self.token_ids) >= self.sampling.max_tokens else None

    def _meets_stop(self, token_id: int, may_stop: bool) -> bool:
        seen = len(self._text)
        self._text += self._show([token_id])
        found = [(self._text.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self.sampling.stop]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not may_stop or not found:
            return False
        at, stop = min(found)
        self._text = self._text[: at + len(stop) if self.sampling.include_stop_str_in_output else at]
        return True

    def _show(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.feed(token_ids) if self._detokenizer else ""

    def completion(self, logprobs: list[dict[int, Logprob]] | None = None) -> Completion:
        """What came of it; only once it has ended."""
        if self.finish_reason is None:
            raise RuntimeError("this request has not ended")
        text = self._text if self.sampling.stop else self._show(self._told())
        return Completion(list(self._prompt_token_ids), self.token_ids, text, self.finish_reason, logprobs)

    def _told(self) -> list[int]:
        """The tokens that are text: all but a stop token that ended it, which vLLM keeps out of the text."""
        stopped_by_token = self.finish_reason == "stop" and self.token_ids[-1] in self.stop_ids
        return (
            self.token_ids[:-1] if stopped_by_token and not self.sampling.include_stop_str_in_output else self.token_ids
        )
