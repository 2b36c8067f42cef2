"""Options of the inverse cloze task; names are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option
from .parse import parse_counts


@dataclass(frozen=True, kw_only=True)
class IctConfig:
    """Two towers that learn to find the block of text that a sentence is from (ict)."""

    titles_data_path: str | None = option(
        "Indexed data set of titles, one sequence for each document of --data-path; none puts no title before a block.",
        default=None,
        refers_to="data",
    )
    query_in_block_prob: float = option(
        "Share of the queries that stay in their block.", default=0.1, minimum=0, maximum=1
    )
    use_one_sent_docs: bool = option("Take blocks of one sentence as well.", default=False)
    retriever_seq_length: int | None = option("--seq-length under the name of retrievers.", default=None, minimum=1)
    biencoder_projection_dim: int = option(
        "Width of a text's embedding; 0 takes that of the stream.", default=0, minimum=0
    )
    biencoder_shared_query_context_model: bool = option("One tower for queries and blocks.", default=False)
    retriever_score_scaling: bool = option("Divide scores by the root of --hidden-size.", default=False)
    retriever_report_topk_accuracies: str | None = option(
        "K K ...: log the share of queries, in percent, whose block is among the K best of the batch.", default=None
    )
    bert_load: str | None = option(
        "BERT that both towers begin as (run, Hugging Face or Megatron directory); --load of a run goes first.",
        default=None,
        refers_to="place",
    )

    @property
    def top_k(self) -> tuple[int, ...]:
        """``retriever_report_topk_accuracies`` as numbers, ascending."""
        text = self.retriever_report_topk_accuracies
        return parse_counts("--retriever-report-topk-accuracies", text) if text else ()
