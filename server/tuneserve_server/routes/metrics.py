"""The Prometheus metrics of the workers, the store and this process."""

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tuneserve_engine.store.base import ServedModel
from tuneserve_engine.telemetry.metric_names import WORKER_METRICS
from tuneserve_server.cleanup.unused_files import UnusedFiles
from tuneserve_server.dependencies import ServicesDep
from tuneserve_server.metric_names import FILES_METRICS, PREFIX

router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(services: ServicesDep) -> Response:
    """Return the metrics of all workers, the store and this process in Prometheus' text format."""
    of_store = await services.store_metrics.metrics()
    told = _Told(await services.served.known(), [*of_store, *_of_files(services.unused)])
    text = generate_latest(told) + generate_latest(services.http_metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _of_files(unused: UnusedFiles) -> Iterable[Metric]:
    for name, meaning in FILES_METRICS.items():
        yield GaugeMetricFamily(f"{PREFIX}{name}", meaning, value=unused.problem is not None)


class _Told(Collector):
    """A collector of the store's and the workers' metrics.

    A worker's metric that this release does not know is left out.
    """

    def __init__(self, served: Sequence[ServedModel], of_store: Sequence[Metric]) -> None:
        self._served = served
        self._of_store = of_store

    def collect(self) -> Iterable[Metric]:
        yield from self._of_store
        workers = GaugeMetricFamily(
            f"{PREFIX}workers",
            "The number of workers that serve the base model.",
            labels=["base_model"],
        )
        for model in self._served:
            workers.add_metric([model.info.name], model.workers)
        yield workers
        for name, meaning in WORKER_METRICS.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"{PREFIX}{name}", meaning, labels=["base_model", "worker"])
            for model in self._served:
                for worker, values in model.metrics.items():
                    if name in values:
                        metric.add_metric([model.info.name, worker], values[name])
            yield metric
