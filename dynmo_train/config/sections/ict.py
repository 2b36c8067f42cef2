"""Options of the inverse cloze task; names are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import panels
from ..options import option
from ..parse import parse_counts


@dataclass(frozen=True, kw_only=True)
class IctConfig:
    """Inverse cloze task (ict): two towers retrieve the block that a sentence is from."""

    PANEL: ClassVar[str] = panels.RETRIEVAL

    titles_data_path: str | None = option(
        "Indexed dataset of document titles; none: no titles.",
        default=None,
        refers_to="data",
    )
    query_in_block_prob: float = option(
        "Probability that a query stays in its block.", default=0.1, minimum=0, maximum=1
    )
    use_one_sent_docs: bool = option("Use blocks of one sentence too.", default=False)
    retriever_seq_length: int | None = option("Alias of --seq-length.", default=None, minimum=1)
    biencoder_projection_dim: int = option("Size of a text embedding; 0: --hidden-size.", default=0, minimum=0)
    biencoder_shared_query_context_model: bool = option("Share one tower between queries and blocks.", default=False)
    retriever_score_scaling: bool = option("Divide scores by the square root of --hidden-size.", default=False)
    retriever_report_topk_accuracies: str | None = option(
        "K K ...: log top-k retrieval accuracies in percent.", default=None
    )
    bert_load: str | None = option(
        "BERT checkpoint that initializes both towers; --load has precedence.",
        default=None,
        refers_to="place",
    )

    @property
    def top_k(self) -> tuple[int, ...]:
        """``retriever_report_topk_accuracies`` as integers, ascending."""
        text = self.retriever_report_topk_accuracies
        return parse_counts("--retriever-report-topk-accuracies", text) if text else ()
