"""Evaluation during a run: the loss over held-out rows, the best checkpoint, and samples."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import typer

from tuneserve_client import (
    Client,
    Datum,
    Future,
    Model,
    RequestFailed,
    TrainOutput,
    TuneserveError,
)
from tuneserve_client.paths import PATH_PREFIX
from tuneserve_server.cli.held_out import SamplePrompt, weight_of
from tuneserve_server.cli.run_events import record_event
from tuneserve_server.cli.train_preview import TokenDecoder
from tuneserve_server.cli.train_recipe import Recipe
from tuneserve_server.cli.train_view import Evaluated
from tuneserve_server.cli.verdict import Diverged, DivergenceWatch, HeldOut, has_no_loss

_ROWS = 64
"""The most held-out rows in one request."""
_AT_ONCE = 4
"""The most of these requests that are under way, so that they do not fill the server's queue."""
_MARK = "tuneserve_train_held_out"
_EVENT_CHARACTERS = 2000
"""The most characters of all samples in a run event: in JSON, none is longer than 6 bytes."""


@dataclass(frozen=True)
class HeldOutData:
    """The held-out rows of a run as datums, and the prompts to continue."""

    rows: int
    data: Sequence[Datum]
    """The rows as datums; a conversation may have several."""
    prompts: Sequence[SamplePrompt]


class Evaluation:
    """The evaluations of one run. Each sees exactly the weights after the steps sent before it."""

    def __init__(
        self, client: Client, model: Model, recipe: Recipe, held_out: HeldOutData, save: str
    ) -> None:
        self.losses: HeldOut | None = None
        self._client = client
        self._model = model
        self._recipe = recipe
        self._held_out = held_out
        self._best_name = f"{save}-best"
        self._tokenizer: TokenDecoder = client.tokenizer(model.base_model)

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether to evaluate now that ``step`` steps are done."""
        is_new = self.losses is None or step > self.losses.last_step
        return is_new and self._recipe.is_evaluated(step, steps)

    @property
    def is_over(self) -> bool:
        """Return whether the loss has not improved for as many evaluations as --patience says."""
        patience = self._recipe.patience
        return bool(patience and self.losses and self.losses.since_best >= patience)

    def evaluate(self, step: int, steps: int, watch: DivergenceWatch) -> Evaluated:
        """Compute the held-out loss, keep the best checkpoint, and sample.

        Raises ``Diverged``.
        """
        try:
            loss = held_out_loss(self._model, self._held_out.data)
        except RequestFailed as error:
            if has_no_loss(error):
                raise Diverged(step, "the held-out loss is not finite") from None
            raise
        before = self.losses
        now = before.with_loss(step, loss) if before else HeldOut.began(step, loss)
        watch.see_held_out(step, loss, now.first_loss)
        is_best = before is not None and now.since_best == 0
        self.losses = self._with_best_saved(now, step) if is_best else now
        samples = self._sampled(step, steps)
        return Evaluated(step, steps, loss, is_best, samples)

    def _with_best_saved(self, losses: HeldOut, step: int) -> HeldOut:
        """Save the weights as the best checkpoint, in place of the one before."""
        path = f"{PATH_PREFIX}{self._model.id}/weights/{self._best_name}"
        saved = replace(losses, best_checkpoint=path)
        metadata = self._recipe.metadata(step) | metadata_of(saved)
        try:
            self._model.save(self._best_name, overwrite=True, user_metadata=metadata).result()
        except TuneserveError as error:
            kept = "the best one before stays" if losses.best_checkpoint else "there is none yet"
            typer.echo(
                f"cannot save the best checkpoint, of step {step}: {error}; {kept}; training goes "
                "on",
                err=True,
            )
            return losses
        return saved

    def _sampled(self, step: int, steps: int) -> list[dict[str, str]]:
        """Return the prompts with their likeliest completions, and record them with the run."""
        if not self._held_out.prompts:
            return []
        try:
            sampler = self._model.save_sampler()
            asked = [
                sampler.sample(each.tokens, max_tokens=self._recipe.sample_tokens, temperature=0)
                for each in self._held_out.prompts
            ]
            completions = [each.result().tokens for each in asked]
        except TuneserveError as error:
            typer.echo(f"cannot sample: {error}; training goes on", err=True)
            return []
        samples = [
            {"prompt": prompt.text, "completion": self._tokenizer.decode(tokens)}
            for prompt, tokens in zip(self._held_out.prompts, completions, strict=True)
        ]
        if self._recipe.is_recorded(step, steps):
            most = max(1, _EVENT_CHARACTERS // (2 * len(samples)))
            short = [{name: text[:most] for name, text in each.items()} for each in samples]
            record_event(self._client, self._model.id, "samples", step, {"samples": short})
        return samples


def held_out_loss(model: Model, data: Sequence[Datum]) -> float:
    """Return the mean loss per weight over the data, under the weights of this moment."""
    sent: deque[Future[TrainOutput]] = deque()
    total = 0.0
    for first in range(0, len(data), _ROWS):
        sent.append(model.forward(data[first : first + _ROWS]))
        if len(sent) > _AT_ONCE:
            total += sent.popleft().result().loss
    return (total + sum(each.result().loss for each in sent)) / weight_of(data)


def metadata_of(losses: HeldOut | None) -> dict[str, str]:
    """Return the held-out losses as metadata of a checkpoint."""
    return {} if losses is None else {_MARK: json.dumps(asdict(losses))}


def losses_in(metadata: Mapping[str, str]) -> HeldOut | None:
    """Return the held-out losses that a checkpoint's metadata hold; None without any."""
    try:
        return HeldOut(**json.loads(metadata[_MARK]))
    except (KeyError, TypeError, ValueError):
        return None
