"""Routes of samples to teachers: by the name in a record, else by its source, else to all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xtoken_core.config.base import ConfigModel

if TYPE_CHECKING:
    from xtoken_core.config.spec import RunSpec

TEACHER_FIELD = "teacher"
"""Field of a record with the name of its teacher, or a list of names."""
MAX_ROUTED = 63
"""Teachers that a row's `teachers` has bits for."""


class RouteError(ValueError):
    """A record names no teacher of the run; the text is the reason."""


class Routes(ConfigModel):
    """The teachers of the samples of a run in which some teacher has a name.

    Attributes:
        named: Numbers of the teachers by name; a name whose teacher is none of this run, such as of a store's build,
            has none.
        sources: Per source of the text the numbers of its teachers; None: all.
        teachers: Number of teachers.
    """

    named: dict[str, tuple[int, ...]]
    sources: tuple[tuple[int, ...] | None, ...]
    teachers: int

    @classmethod
    def of(cls, run: RunSpec, only: int | None = None) -> Routes | None:
        """Return the routes of a run; None if no teacher has a name, and all compare every sample.

        Args:
            run: The run.
            only: Number of the one teacher that the routes are for, which becomes number 0; None: all.
        """
        numbers = range(len(run.teacher)) if only is None else (only,)
        named = {
            teacher.name: tuple(at for at, number in enumerate(numbers) if run.teacher[number].name == teacher.name)
            for teacher in run.teacher
            if teacher.name is not None
        }
        if not named:
            return None
        given = (source.teachers for source in run.data.sources)
        sources = tuple(None if own is None else tuple(sorted(n for name in own for n in named[name])) for own in given)
        return cls(named=named, sources=sources, teachers=len(numbers))

    def teachers_of(self, record: Mapping[str, Any], source: int) -> tuple[int, ...]:
        """Return the numbers of the teachers that compare a record, ascending.

        Args:
            record: Its value.
            source: Number of its source.

        Raises:
            RouteError: It names a teacher that the run does not have.
        """
        names = record.get(TEACHER_FIELD)
        if names is None:
            own = self.sources[source] if self.sources else None
            return tuple(range(self.teachers)) if own is None else own
        listed = list(names) if isinstance(names, (list, tuple)) else [names]
        unknown = next((name for name in listed if not isinstance(name, str) or name not in self.named), None)
        if unknown is not None or not listed:
            raise RouteError(
                f"the field {TEACHER_FIELD!r} names {f'the teacher {unknown!r}' if listed else 'no teacher'}: the run "
                f"has {', '.join(self.named)}: correct the record, or name a [[teacher]] so (teacher.name)"
            )
        return tuple(sorted({number for name in listed for number in self.named[name]}))

    def form_of(self, teacher: int) -> tuple[list[str], list[bool]]:
        """Return the names of a teacher, and per source whether it compares it: all that its samples depend on."""
        names = [name for name, numbers in self.named.items() if teacher in numbers]
        return names, [own is None or teacher in own for own in self.sources]


def check_routes(run: RunSpec) -> None:
    """Refuse names that route no sample, or not as meant.

    Raises:
        ValueError: The first of them.
    """
    names = [teacher.name for teacher in run.teacher if teacher.name is not None]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(f"teacher.name = {double!r} is there twice: give every teacher a name of its own")
    for number, source in enumerate(run.data.sources):
        field = f"data.sources.{number}.teachers"
        if source.teachers == ():
            raise ValueError(f"{field} names no teacher: name one, or leave it out for all of them")
        unknown = next((name for name in source.teachers or () if name not in names), None)
        if unknown is not None:
            known = f"the names are {', '.join(names)}" if names else "no [[teacher]] has a name"
            raise ValueError(f"{field} names the teacher {unknown!r}, and {known}: correct it, or set teacher.name")
    for number, teacher in enumerate(run.teacher):
        if run.data.sources and teacher.name is None and all(source.teachers for source in run.data.sources):
            raise ValueError(
                f"teacher.{number} has no name, and every source names others (data.sources, teachers): name it there, "
                "or remove it"
            )
    if names and len(run.teacher) > MAX_ROUTED:
        raise ValueError(f"teacher.name: samples are routed among {MAX_ROUTED} teachers at most: unset the names")
