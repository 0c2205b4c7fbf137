"""What the workers tell of themselves, for Prometheus."""

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tuneserve_engine.figures import FIGURES
from tuneserve_engine.queue.base import ServedModel
from tuneserve_server.deps import ServicesDep

router = APIRouter()

_PREFIX = "tuneserve_"


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(services: ServicesDep) -> Response:
    """Figures of every worker, in Prometheus' text format."""
    text = generate_latest(_Told(await services.served.known()))
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Told(Collector):
    """The workers' figures as metrics. One that this release does not know is left out."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        workers = GaugeMetricFamily(
            f"{_PREFIX}workers", "Workers that serve the base model.", labels=["base_model"]
        )
        for model in self._served:
            workers.add_metric([model.info.name], model.workers)
        yield workers
        for name, meaning in FIGURES.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"{_PREFIX}{name}", meaning, labels=["base_model", "worker"])
            for model in self._served:
                for worker, figures in model.figures.items():
                    if name in figures:
                        metric.add_metric([model.info.name, worker], figures[name])
            yield metric
