"""The task: `countdown` of reasoning-gym with three digits. "3 8 4 = 7 :" is answered by "3 + 8 - 4", or in another order."""

import random
import zlib
from dataclasses import dataclass
from functools import cache

import reasoning_gym
import torch
from torch import Tensor

WORDS = ["<pad>", "<eos>", "=", ":", "+", "-", *map(str, range(1, 28))]  # every number is one token
TOKEN = {word: i for i, word in enumerate(WORDS)}
PAD, EOS = TOKEN["<pad>"], TOKEN["<eos>"]
ANSWER_LENGTH = 6

_dataset = reasoning_gym.create_dataset(
    "countdown",
    seed=0,
    size=3000,
    min_numbers=3,
    max_numbers=3,
    max_value=9,
    min_target=1,
    max_target=27,
    operators=("+", "-"),
)


@dataclass(frozen=True)
class Problem:
    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def prompt(self) -> list[int]:
        return [TOKEN[word] for word in (*map(str, self.numbers), "=", str(self.target), ":")]

    def reward(self, answer: list[int]) -> float:
        """1 if reasoning-gym's verifier accepts the tokens before <eos> as a solution, else 0."""
        text = " ".join(WORDS[i] for i in answer)
        if not text.endswith(" <eos>"):
            return 0.0
        return _verify(tuple(sorted(self.numbers)), self.target, text.removesuffix(" <eos>"))


@cache
def _verify(numbers: tuple[int, ...], target: int, text: str) -> float:
    return float(_dataset.score_answer(text, {"metadata": {"numbers": numbers, "target": target}}) == 1.0)


@cache
def problems() -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): no three digits of one side occur on the other, in any order."""
    train, held_out = [], []
    for i in range(len(_dataset)):
        entry = _dataset[i]
        numbers = tuple(entry["metadata"]["numbers"])
        unseen = zlib.crc32(bytes(sorted(numbers))) % 6 == 0
        (held_out if unseen else train).append(Problem(numbers, entry["metadata"]["target"], entry["answer"]))
    return train, held_out


def demonstration(problem: Problem, rng: random.Random, correct: float) -> list[int]:
    """A solution with probability `correct`, otherwise the same three digits with random signs, in random order."""
    words = problem.solution.split()
    if rng.random() >= correct:
        numbers = rng.sample(problem.numbers, 3)
        words = [str(numbers[0])]
        for n in numbers[1:]:
            words += [rng.choice("+-"), str(n)]
    return [TOKEN[word] for word in words] + [EOS]


def prompts(batch: list[Problem]) -> Tensor:
    return torch.tensor([p.prompt for p in batch])


def rewards(batch: list[Problem], answers: Tensor, mask: Tensor) -> Tensor:
    pairs = zip(batch, answers.tolist(), mask.sum(1).tolist(), strict=True)
    return torch.tensor([p.reward(tokens[:n]) for p, tokens, n in pairs])
