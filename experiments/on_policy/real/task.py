"""The task: the infinitive of a French verb in one of six persons; verbs of the test are in no training."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xtoken_core.atomic import atomic_write

SHOWN = 4
"""Solved lines before a question."""
HELD_OUT = 40
"""Verbs of the test; as many of validation are a quarter of them."""

# Regular in every form of the present; they begin with a consonant that takes no apostrophe.
_VERBS = """
baisser barrer bavarder blesser bloquer border boucher bouder bousculer bricoler briller brosser brouiller brûler
cacher calculer calmer camper casser causer chanter charmer chasser chauffer chercher chuchoter circuler coller
commander comparer compter conseiller conserver consoler consommer consulter contester continuer couler couper coûter
crier cuisiner cultiver danser décider déclarer décorer demander demeurer deviner dicter diminuer discuter donner
douter dresser durer fabriquer fermer fêter filmer fixer former fouiller frapper frotter fumer gagner garder glisser
goûter gratter griller grimper gronder guider jouer jurer laisser laver limiter louer lutter marcher marquer masquer
mesurer monter montrer parler participer passer patienter penser pleurer plier porter poser pousser pratiquer
présenter prêter prouver quitter raconter ramasser rattraper refuser regarder regretter remarquer remercier rencontrer
rentrer respecter respirer ressembler rester retourner retrouver rêver rouler saluer sauter sauver sembler serrer
siffler signaler signer soigner sonner souffler souhaiter stationner supporter téléphoner tenter terminer tirer tomber
toucher tourner travailler traverser tromper trouver tuer verser vider visiter voler voter
"""
VERBS = tuple(_VERBS.split())
PERSONS = {"je": "e", "tu": "es", "il": "e", "nous": "ons", "vous": "ez", "ils": "ent"}
"""Endings of the present, after the stem."""


class Question(NamedTuple):
    """A verb and a person."""

    verb: str
    person: str

    @property
    def text(self) -> str:
        """Return the line up to its answer."""
        return f"{self.person} {self.verb.removesuffix('er')}{PERSONS[self.person]} :"


@dataclass(frozen=True)
class Files:
    """Files of the task in a directory.

    Attributes:
        directory: Theirs.
    """

    directory: Path

    @property
    def prompts(self) -> Path:
        """Prompts of the training."""
        return self.directory / "prompts.jsonl"

    @property
    def answers(self) -> Path:
        """The same prompts with the teacher's answers."""
        return self.directory / "answers.jsonl"

    @property
    def validation(self) -> Path:
        """Prompts and right answers of the validation."""
        return self.directory / "validation.jsonl"

    @property
    def test(self) -> Path:
        """Prompts and right answers of the test."""
        return self.directory / "test.jsonl"

    @property
    def text(self) -> Path:
        """The right answers of the validation as text."""
        return self.directory / "text.jsonl"


def split_verbs() -> tuple[list[str], list[str], list[str]]:
    """Return the verbs of training, validation and test."""
    verbs = sorted(VERBS)
    random.Random(0).shuffle(verbs)
    return verbs[HELD_OUT + HELD_OUT // 4 :], verbs[HELD_OUT : HELD_OUT + HELD_OUT // 4], verbs[:HELD_OUT]


def prompt_of(question: Question, shown: Sequence[str], rng: random.Random) -> str:
    """Return a question after solved lines with other verbs.

    Args:
        question: The question.
        shown: Verbs of the solved lines, at least `SHOWN` and one more.
        rng: Chooses among them.
    """
    verbs = rng.sample([verb for verb in shown if verb != question.verb], SHOWN)
    solved = [Question(verb, rng.choice(list(PERSONS))) for verb in verbs]
    return "".join(f"{each.text} {each.verb}\n" for each in solved) + question.text


def write_files(directory: Path, *, train: int, validation: int, test: int) -> Files:
    """Write prompts with right answers; training has prompts alone.

    Args:
        directory: Where the files go.
        train: Prompts of the training.
        validation: Prompts of the validation, at most.
        test: Prompts of the test, at most.
    """
    files = Files(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for_training, for_validation, for_test = split_verbs()
    rng = random.Random(1)
    drawn = (Question(rng.choice(for_training), rng.choice(list(PERSONS))) for _ in range(train))
    _write(files.prompts, [{"prompt": prompt_of(each, for_training, rng)} for each in drawn])
    for file, verbs, count in ((files.validation, for_validation, validation), (files.test, for_test, test)):
        every = [Question(verb, person) for verb in verbs for person in PERSONS]
        rng.shuffle(every)
        records = [{"prompt": prompt_of(each, for_training, rng), "answer": each.verb} for each in every]
        _write(file, records[:count])
    records = [json.loads(line) for line in files.validation.read_text(encoding="utf-8").splitlines()]
    _write(files.text, [{"text": f"{record['prompt']} {record['answer']}\n"} for record in records])
    return files


def _write(file: Path, records: Sequence[dict[str, str]]) -> None:
    atomic_write(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
