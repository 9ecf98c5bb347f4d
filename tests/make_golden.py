"""Writes tests/golden.json with transformers: what the tests compare with where torch isn't installed.

    python tests/make_golden.py        (needs torch and transformers)
"""
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from configs import CASES  # noqa: E402
from make_random_model import make_random_model  # noqa: E402

QUESTIONS = ["What is the capital of France?", "Which language is spoken in Brazil?", "日本的首都是哪里？", "埃及用什么货币？",
             "What is 417 + 385?", "Subtract 298 from 61.", "Tell me a story about a fox.",
             "Who won the last world cup?", "Hello!", "Repeat: Zanolu 57 owl"]


def load(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32,
                                                             attn_implementation="eager").eval()


def greedy(model: transformers.PreTrainedModel, ids: list[int], n: int, end: int | None = None) -> list[int]:
    """n greedy tokens of transformers' own generate, which include the `end` that stops it."""
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=end)
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                              do_sample=False,
                              max_new_tokens=n)[0, len(ids):].tolist()


def main() -> None:
    golden: dict = {"random": {}, "demo": []}
    for name, (config, dtype, shards) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = load(make_random_model(config, Path(folder), dtype, shards))
            ids = np.random.default_rng(1).integers(0, config["vocab_size"], 7).tolist()
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            golden["random"][name] = {"prompt": ids, "spread": round(logits.std().item(), 6),
                                      "greedy": greedy(model, ids, 64),
                                      "logits": [round(x, 6) for x in logits[:8].tolist()]}
    model, tokenizer = load(ROOT / "demo"), transformers.AutoTokenizer.from_pretrained(ROOT / "demo")
    for question in QUESTIONS:
        for enable_thinking in (True, False):
            text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False,
                                                 add_generation_prompt=True,
                                                 enable_thinking=enable_thinking)
            ids = tokenizer(text)["input_ids"]
            answer = greedy(model, ids, 160, tokenizer.convert_tokens_to_ids("<|im_end|>"))
            golden["demo"].append({"question": question, "enable_thinking": enable_thinking, "prompt": ids,
                                   "greedy": answer})
    random = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden["random"].items())
    demo = ",\n".join(json.dumps(case, ensure_ascii=False) for case in golden["demo"])
    (ROOT / "tests" / "golden.json").write_text(f'{{"random": {{\n{random}\n}},\n"demo": [\n{demo}\n]}}\n')


if __name__ == "__main__":
    main()
