"""The recording of a model with other layers than those that ran: more of the same, or fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deepoffload.estimate.layers import Places, Stack
from deepoffload.estimate.recording import LiveBytes, NotRegular, Recording, Visit

Kept = Sequence[Sequence[int]]
"""Numbers of layers, stack by stack."""

_Visited = tuple[Visit, list[LiveBytes]]
"""A visit and its spans."""

_Key = tuple[int, int, int]
"""Where a visit is: in which pass, in which layer of its stack (-1: in none), and its number there."""


@dataclass
class _Pass:
    """Visits of the layers of ``stack``, one layer after the other (``stack`` -1: visits of none)."""

    stack: int
    after_forward: bool
    layers: list[int]
    visits: list[list[_Visited]]


class Expansion:
    """From the recording of a model with the layers ``shown`` to that of one with the layers ``wanted``."""

    def __init__(self, stacks: Sequence[Stack], places: Places, radius: int, shown: Kept, wanted: Kept) -> None:
        self.radius = radius
        self._places, self._shown, self._wanted = places, shown, wanted
        self._contexts = [stack.contexts(radius) for stack in stacks]
        self._sorts = [stack.sorts for stack in stacks]
        self._unique = [Counter(contexts) for contexts in self._contexts]
        self._stands_for = [
            {self._contexts[at][number]: number for number in numbers} for at, numbers in enumerate(shown)
        ]
        self._position = [{number: at for at, number in enumerate(numbers)} for numbers in wanted]
        self._shown_position = [{number: at for at, number in enumerate(numbers)} for numbers in shown]
        self._copies: list[dict[int, list[int]]] = [{} for _ in stacks]
        for at, numbers in enumerate(wanted):
            for number in numbers:
                self._copies[at].setdefault(self._model_of(at, number), []).append(number)

    def _model_of(self, stack: int, layer: int) -> int:
        """The layer that ran in its place."""
        ran = layer in self._shown_position[stack]
        return layer if ran else self._stands_for[stack][self._contexts[stack][layer]]

    def of(self, run: Recording) -> Recording:
        """Raises ``NotRegular`` where layers that should do the same do not, or are not called in their order."""
        passes = self._passes(run)
        shared = self._without_shared(passes)
        old: list[_Key] = [
            (at, layer, number)
            for at, each in enumerate(passes)
            for layer, visits in zip(each.layers, each.visits, strict=True)
            for number in range(len(visits))
        ]
        for each in passes:
            if each.stack >= 0:
                self._check(each)
        result = [(key, visited) for at, each in enumerate(passes) for key, visited in self._wanted_of(at, each)]
        new = {key: number for number, (key, _) in enumerate(result)}
        frees = _Frees(self, passes, old, new)
        for made_in, nbytes, (at, layer, number), which in shared:
            visit, mine = result[new[at, layer, number]][1]
            span = mine[which]
            span = replace(span, net_bytes=span.net_bytes - nbytes, freed=span.freed + Counter({made_in: nbytes}))
            result[new[at, layer, number]] = (at, layer, number), (visit, [*mine[:which], span, *mine[which + 1 :]])
        spans = [frees.moved(span, key, number) for number, (key, (_, mine)) in enumerate(result) for span in mine]
        visits = tuple(visit for _, (visit, _) in result)
        ops = list(dict.fromkeys(op for visit in visits for op in visit.ops))
        return replace(
            run,
            visits=visits,
            spans=tuple(spans),
            calls={op: run.calls[op] for op in ops},
            made_bytes={op: run.made_bytes[op] for op in ops},
        )

    def _passes(self, run: Recording) -> list[_Pass]:
        spans: dict[int, list[LiveBytes]] = {}
        for span in run.spans:
            spans.setdefault(span.visit, []).append(span)
        passes: list[_Pass] = []
        where = self._where(run.visits)
        for number, visit in enumerate(run.visits):
            stack, layer = where[number] or (-1, -1)
            after_forward = spans[number][0].after_forward
            if not passes or (passes[-1].stack, passes[-1].after_forward) != (stack, after_forward):
                passes.append(_Pass(stack, after_forward, [], []))
            if not passes[-1].layers or passes[-1].layers[-1] != layer:
                passes[-1].layers.append(layer)
                passes[-1].visits.append([])
            passes[-1].visits[-1].append((visit, spans[number]))
        return passes

    def _where(self, visits: Sequence[Visit]) -> list[tuple[int, int] | None]:
        """The stack and the layer of each visit. One of units that layers share is in the layer of the visits next to
        it, if that uses them; or else in the one that uses them between these layers."""
        where = [self._places.place(visit.units) for visit in visits]
        for number, visit in enumerate(visits):
            shared = self._places.sharing(visit.units)
            if where[number] is None and shared is not None:
                behind = (at for at in range(number + 1, len(visits)) if not self._places.sharing(visits[at].units))
                around = where[number - 1], where[next(behind, number)]
                near = [place[1] for place in around if place is not None and place[0] == shared[0]]
                where[number] = shared[0], self._sharing_layer(*shared, near)
        return where

    def _sharing_layer(self, stack: int, users: Sequence[int], near: Sequence[int]) -> int:
        position = self._shown_position[stack]
        for layer in near:
            if layer in users:
                return layer
        between = [
            layer
            for layer in users
            if layer in position and all(abs(position[layer] - position[other]) == 1 for other in near)
        ]
        if not near or len(between) != 1:
            raise NotRegular
        return between[0]

    def _without_shared(self, passes: Sequence[_Pass]) -> list[tuple[int, int, _Key, int]]:
        """Take out of the spans what the last layer of a sort frees that was made in no layer: all layers of the sort
        share it (a table of rotations). Who frees it of the wanted ones: made in which visit, bytes, where, which span.
        """
        stack_of = [each.stack for each in passes for visits in each.visits for _ in visits]
        found: list[tuple[int, int, _Key, int]] = []
        for at, each in enumerate(passes):
            if each.stack < 0:
                continue
            for place, visits in enumerate(each.visits):
                behind = {self._sorts[each.stack][layer] for layer in each.layers[place + 1 :]}
                if self._sorts[each.stack][each.layers[place]] in behind:
                    continue  # others of its sort come behind it, and they do without
                for number, (_, spans) in enumerate(visits):
                    for which, span in enumerate(spans):
                        shared = Counter({made: n for made, n in span.freed.items() if stack_of[made] < 0})
                        if shared:
                            last = self._last_user(each, place, behind)
                            found += [(made, n, (at, last, number), which) for made, n in shared.items()]
                            spans[which] = replace(
                                span, net_bytes=span.net_bytes + shared.total(), freed=span.freed - shared
                            )
        return found

    def _last_user(self, each: _Pass, place: int, unused: set[int]) -> int:
        """The wanted layer that comes last in a pass of those that use what the one at ``place`` lets go. Layers of
        the sorts ``unused`` do not use it."""
        sorts = self._sorts[each.stack]
        forwards = each.layers == list(self._shown[each.stack])
        wanted = self._wanted[each.stack]
        last = next(layer for layer in (reversed(wanted) if forwards else wanted) if sorts[layer] not in unused)
        if sorts[last] != sorts[each.layers[place]]:
            raise NotRegular  # perhaps it uses it, too
        return last

    def _check(self, each: _Pass) -> None:
        stack, shown = each.stack, list(self._shown[each.stack])
        if each.layers not in (shown, shown[::-1]):
            raise NotRegular
        by_layer = dict(zip(each.layers, each.visits, strict=True))
        for layer, visits in by_layer.items():
            other = self._stands_for[stack][self._contexts[stack][layer]]
            if other != layer and not _alike(self._copy(by_layer[other], stack, other, layer), visits):
                raise NotRegular

    def _wanted_of(self, at: int, each: _Pass) -> Iterator[tuple[_Key, _Visited]]:
        if each.stack < 0:
            yield from (((at, -1, number), visited) for number, visited in enumerate(each.visits[0]))
            return
        by_layer = dict(zip(each.layers, each.visits, strict=True))
        forwards = each.layers == list(self._shown[each.stack])
        for layer in self._wanted[each.stack] if forwards else reversed(self._wanted[each.stack]):
            ran = self._model_of(each.stack, layer)
            for number, visited in enumerate(self._copy(by_layer[ran], each.stack, ran, layer)):
                yield (at, layer, number), visited

    def _copy(self, visits: list[_Visited], stack: int, layer: int, other: int) -> list[_Visited]:
        """The same in another layer."""
        if layer == other:
            return visits
        like = self._places.like(stack, layer, other)
        return [
            (
                replace(
                    visit,
                    units=tuple(like[unit] for unit in visit.units),
                    landed=Counter({like[unit]: count for unit, count in visit.landed.items()}),
                ),
                spans,
            )
            for visit, spans in visits
        ]

    # -- for what is freed ---------------------------------------------------------------------------------------------

    def copies(self, stack: int, ran: int) -> Sequence[int]:
        """The wanted layers for which a layer stands that ran."""
        return self._copies[stack].get(ran, ())

    def distance(self, stack: int, layer: int, other: int) -> int:
        """From one layer that ran to another."""
        return self._shown_position[stack][other] - self._shown_position[stack][layer]

    def at_distance(self, stack: int, layer: int, distance: int) -> int:
        """The wanted layer so many layers away."""
        return _at(self._wanted[stack], self._position[stack][layer] + distance)

    def sharing(self, stack: int, ran: int, made_in: int, wanted: int) -> int | None:
        """The wanted layer that is as many layers away from ``wanted`` as ``made_in`` from ``ran``, of those alone
        that share a unit with these. None where they share none."""
        users = self._places.users_of(stack, ran, made_in)
        if not users:
            return None
        ran_users, wanted_users = ([n for n in of[stack] if n in users] for of in (self._shown, self._wanted))
        return _at(wanted_users, wanted_users.index(wanted) + ran_users.index(made_in) - ran_users.index(ran))

    def is_unique(self, stack: int, layer: int) -> bool:
        """Whether no other layer has such neighbours."""
        return self._unique[stack][self._contexts[stack][layer]] == 1


class _Frees:
    """What is freed in one visit of bytes that another one made, said of the new visits.

    What a layer frees of layers around it, all that it stands for free of those around them. What others free (a cache
    of keys, when the forward ends), they free of all layers that a layer stands for. A layer that is the only one
    between such neighbours does the first with its neighbours, and the second with those behind them. What layers that
    share a unit free of each other (the sum of its gradients so far), they free of the next one that shares it.
    """

    def __init__(
        self, expansion: Expansion, passes: Sequence[_Pass], old: Sequence[_Key], new: dict[_Key, int]
    ) -> None:
        self._expansion, self._passes, self._old, self._new = expansion, passes, old, new

    def moved(self, span: LiveBytes, key: _Key, number: int) -> LiveBytes:
        """``span`` as that of the new visit ``number``, which is at ``key``."""
        freed: Counter[int] = Counter()
        more = 0
        for made_in, nbytes in span.freed.items():
            places = self._places(self._old[span.visit], key, self._old[made_in])
            more += nbytes * (len(places) - 1)
            for place in places:
                if place not in self._new:
                    raise NotRegular
                freed[self._new[place]] += nbytes
        return replace(span, visit=number, net_bytes=span.net_bytes - more, freed=freed)

    def _places(self, ran: _Key, wanted: _Key, made_in: _Key) -> list[_Key]:
        """Where bytes were made that the visit ``wanted`` frees, because ``ran``, for which it stands, freed some of
        those made in ``made_in``."""
        expansion, (at, layer, number) = self._expansion, made_in
        stack = self._passes[at].stack
        if stack < 0:
            return [made_in]
        if self._passes[ran[0]].stack == stack:
            distance = expansion.distance(stack, ran[1], layer)
            if abs(distance) <= expansion.radius:
                return [(at, expansion.at_distance(stack, wanted[1], distance), number)]
            sharing = expansion.sharing(stack, ran[1], layer, wanted[1])
            if sharing is not None:
                return [(at, sharing, number)]
            if not expansion.is_unique(stack, ran[1]):
                return [(at, expansion.at_distance(stack, wanted[1], distance), number)]
        return [(at, copy, number) for copy in expansion.copies(stack, layer)]


def _at(layers: Sequence[int], position: int) -> int:
    if not 0 <= position < len(layers):
        raise NotRegular
    return layers[position]


def _alike(one: Sequence[_Visited], other: Sequence[_Visited]) -> bool:
    """Whether two layers do the same."""
    return len(one) == len(other) and all(
        visit == their_visit and list(map(_moved, spans)) == list(map(_moved, their_spans))
        for (visit, spans), (their_visit, their_spans) in zip(one, other, strict=True)
    )


def _moved(span: LiveBytes) -> tuple[bool, int, int]:
    return span.after_forward, span.net_bytes, span.over_bytes
