"""How likely a model finds a text."""
import numpy as np

from qwen3 import Model, NextTokens, TokenIds, check_answers, check_finite, checked_ids, compute
from qwen3_lib.generation.processors import log_softmax
from tokenizer_utils import InputError

SCORED = 128  # positions whose logits are in memory at a time: 78 MB with a vocabulary of 151,936


def score(model: Model, token_ids: TokenIds) -> np.ndarray:
    """The logprob of each token of a text [n] but the first, given those before it -> [n - 1], natural logarithms.

    Perplexity is exp of minus their mean. Raises InputError for ids out of range and for too long a text.
    """
    check_answers(model)
    ids = checked_ids(model, token_ids)
    if (ids < 0).any():
        raise InputError("a picture's tokens have no probability")
    if len(ids) > model.config.context_length:
        raise InputError(f"the text has {len(ids)} tokens; the model's context is {model.config.context_length}")
    cache, logprobs = model.engine.new_cache(model.config, len(ids)), [np.empty(0, np.float32)]
    for start in range(0, len(ids) - 1, SCORED):
        now, following = ids[start:start + SCORED], ids[start + 1:start + SCORED + 1]
        logits, _ = compute(model, [NextTokens(cache, now, len(now))])  # [SCORED, vocab_size]
        check_finite(model, logits)
        x = log_softmax(logits)
        logprobs.append(x[np.arange(len(following)), following])
    return np.concatenate(logprobs)
