"""A sound as requests to a Batch, one for each of its parts: for the server and for batch files."""
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from qwen3 import Model
from qwen3_asr import RATE, language_and_text, language_named, sounds_of, speech_prompt, usual_limit
from qwen3_lib.app.fields import Body, body_options
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.transcript import LONGEST_PART, Part, parts_in, usual_part
from qwen3_lib.io.cores import in_turns
from qwen3_lib.io.sounds import Recording, open_sound


class SpeechRequest:
    """A sound that is written down part after part.

    `asks` opens the sound. It gives a part's prompt and options when the answer before has been taken, and before these
    None for each window that the tower has heard, so that others can be served in between.
    """
    salt, tools = "", None

    def __init__(self, model: Model, sound: Any, body: Body, defaults: dict[str, Any], context: str, longest: int,
                 usual: float = LONGEST_PART):
        """`body`: language and options; `longest`: tokens of a prompt and its answer; `usual`: seconds of a part.

        Raises InputError.
        """
        self.model, self.sounds, self.language = model, sounds_of(model), language_named(body.get("language"))
        self.options = body_options({"stop_loops": True, "temperature": 0.0} | defaults, body)
        self.sound, self.context, self.parts, self.end = sound, context, list[Part](), 0
        self.longest_part = usual_part(longest, usual)

    def open(self) -> Recording:
        return open_sound(self.sound)

    def asks(self) -> Generator[tuple[list[int], AnswerOptions] | None]:
        for self.samples in parts_in(self.open().blocks, self.longest_part):
            self.start, self.end = self.end, self.end + len(self.samples)
            for sound in self.sounds.hear_in_pieces(self.samples, in_turns):
                if sound is None:
                    yield None
            limit = self.options.max_new_tokens or usual_limit(sound)
            yield (speech_prompt(self.model, sound, self.language, self.context).tolist(),
                   replace(self.options, max_new_tokens=limit))

    @property
    def answers(self) -> Iterator[tuple[list[int], AnswerOptions]]:
        return filter(None, self.asks())

    def take(self, answer: Completion) -> Part:
        """The part to which this is the answer."""
        language, text = language_and_text(answer.text, self.language)
        self.parts.append(Part(self.start / RATE, self.end / RATE, text, language, str(answer.ended),
                               len(answer.token_ids)))
        return self.parts[-1]
