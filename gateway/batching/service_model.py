"""What was learned of one lane's backend: a service curve for each group of requests that may share a batch."""

from collections.abc import Hashable, Mapping
from typing import Any, Final

from gateway.batching.queue import LengthGroup
from gateway.batching.service_curve import ServiceCurve, size_grid
from gateway.batching.surface import Surface

_CURVES: Final = 256


class ServiceModel:
    """The curves of one lane, by input bucket; those that learned last come last.

    A length that was never seen is predicted by the surface of those that were; anything else is like what learned last, and
    starts from there with its first batch. latest: that. What the first batches of buckets tell is learned together as well:
    where clients name many, each runs once or twice, and one batch alone tells little.
    """

    def __init__(self, max_rows: int, row_sizes: tuple[int, ...] = ()) -> None:
        self.sizes = size_grid(max_rows, row_sizes)
        self._curves: dict[Hashable, ServiceCurve] = {}
        self._surfaces: dict[Hashable, Surface] = {}  # by shape key, of these curves
        self._passing = ServiceCurve(self.sizes)  # of the first batches of all without a length
        self.latest = self._passing
        self._kept: dict[str, Mapping[str, Any]] = {}
        self._kept_surfaces: dict[str, Mapping[str, Any]] = {}

    @property
    def curves(self) -> Mapping[Hashable, ServiceCurve]:
        return self._curves

    @property
    def probe_rows(self) -> tuple[int, ...]:
        """The sizes to run before traffic: the smallest and the largest."""
        return self.sizes[:1] if len(self.sizes) == 1 else (self.sizes[0], self.sizes[-1])

    def probe(self, bucket: Hashable, rows: int, times_ns: list[int]) -> None:
        """Learn from two or more runs of `rows` rows before traffic."""
        self.curve(bucket).probe(rows, times_ns)

    def curve(self, bucket: Hashable) -> ServiceCurve:
        """Its own, to be taught."""
        curve = self._curves.get(bucket)
        if curve is None:
            curve = self._new(bucket)
            kept = self._kept.pop(repr(bucket), None)
            if kept is not None:
                curve.restore(kept)
            elif not curve.ready and (like := self.like()).ready:
                curve.borrow(like)
            self._keep(bucket, curve)
        return curve

    def known(self, bucket: Hashable) -> ServiceCurve:
        """What to expect of it, to be read. Without a length it gets none of its own by that: clients think of any number."""
        curve = self._curves.get(bucket)
        if curve is not None and curve.ready:
            return curve
        if isinstance(bucket, LengthGroup) or (self._kept and repr(bucket) in self._kept):
            return self.curve(bucket)
        return self.like()

    def like(self) -> ServiceCurve:
        """What a bucket of which nothing is known is taken to be like; not ready, if nothing is known of any."""
        if self.latest.ready:
            return self.latest
        return next((curve for curve in reversed(self._curves.values()) if curve.ready), self.latest)

    def observe(self, bucket: Hashable, rows: int, busy: int, time_ns: int) -> ServiceCurve:
        """Teach its own, as `ServiceCurve.observe` has it."""
        like = self.like()
        curve = self.curve(bucket)
        if curve is not self.latest:
            self._curves[bucket] = self._curves.pop(bucket)
            self.latest = curve
            if curve.fleeting and not isinstance(bucket, LengthGroup):
                self.latest = self._passing
                if not self._passing.ready and like.ready:
                    self._passing.borrow(like)
                self._passing.observe(rows, busy, time_ns)
        curve.observe(rows, busy, time_ns)
        return curve

    def to_dict(self) -> dict[str, Any]:
        """What is worth keeping between restarts, as JSON can hold it."""
        return {
            "buckets": {repr(bucket): curve.to_dict() for bucket, curve in self._curves.items() if curve.seen},
            "surfaces": {repr(key): surface.to_dict() for key, surface in self._surfaces.items() if surface.ready},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave, before traffic. Raises: ValueError, if it is something else."""
        buckets = kept.get("buckets") if isinstance(kept, Mapping) else None
        if not isinstance(buckets, Mapping):
            raise ValueError("not a service model: expected a mapping with the key `buckets`")
        surfaces = kept.get("surfaces", {})  # none, where there were no lengths
        if not isinstance(surfaces, Mapping):
            raise ValueError("not a service model: its `surfaces` are no mapping")
        for curve in buckets.values():
            ServiceCurve(self.sizes).restore(curve)
        for surface in surfaces.values():
            Surface().restore(surface)
        self._kept = dict(buckets)
        self._kept_surfaces = dict(surfaces)
        for key in [key for key in self._surfaces if repr(key) in surfaces]:
            self._surfaces[key].restore(self._kept_surfaces.pop(repr(key)))
        for bucket in [bucket for bucket in self._curves if repr(bucket) in self._kept]:
            self._curves[bucket].restore(self._kept.pop(repr(bucket)))

    def _new(self, bucket: Hashable) -> ServiceCurve:
        if not isinstance(bucket, LengthGroup):
            return ServiceCurve(self.sizes)
        surface = self._surfaces.get(bucket.shape_key)
        if surface is None:
            surface = self._surfaces[bucket.shape_key] = Surface()
            kept = self._kept_surfaces.pop(repr(bucket.shape_key), None)
            if kept is not None:
                surface.restore(kept)
        return ServiceCurve(self.sizes, bucket.length, surface)

    def _keep(self, bucket: Hashable, curve: ServiceCurve) -> None:
        """Of too many the first is forgotten that has hardly run, or else the first."""
        curves = self._curves
        if len(curves) >= _CURVES:
            gone = next((known for known, other in curves.items() if other.fleeting), next(iter(curves)))
            del curves[gone]
            if isinstance(gone, LengthGroup) and all(known.shape_key != gone.shape_key for known in curves):  # type: ignore[attr-defined]
                self._surfaces.pop(gone.shape_key, None)
        curves[bucket] = curve
