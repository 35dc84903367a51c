"""The recipe, as values."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

Overflow = Literal["split", "truncate", "drop", "error"]
"""What happens to a document that is too long."""

# --- What a recipe says of rows that are no plain text or ids: chats, lists of texts and images, masks of loss.
#
# Their checks are in `recipe/sources.py`.


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands around the content of a message."""

    before: str = ""
    """Text before it, without loss. The names of special tokens are these tokens."""
    after: str = ""
    """Text after it, with the loss of the content: what ends a turn is learned with it."""


class Chat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How messages become one document."""

    template: str | None = None
    """A template that is known by name, `plain`, `chatml` or `llama3`; or the path of the `tokenizer_config.json` of a
    model, or of a file that ends in `.jinja`, relative to the recipe's folder. None: `plain`, or what `turns` says."""
    tools: str | None = None
    """With a path: a file of JSON, a list of tools that each conversation without tools of its own may call."""
    variables: dict[str, str | int | float | bool | None] | None = None
    """With a path: what else the template may use, as `enable_thinking: false`."""
    turns: dict[str, Turn] | None = None
    """A template of one's own: what stands around the content of each role. A message of another role is an error."""
    separator: str | None = None
    """Text behind each turn of `turns`, without loss; None: nothing."""
    loss: tuple[str, ...] = ("assistant",)
    """The roles whose contents are trained on."""


class RowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows of a source become documents, where they are no plain text or ids; made from the keys of a source."""

    rows: Literal["messages", "interleaved", "tokens"]
    """What the column holds."""
    chat: Chat | None = None
    """The template of messages."""
    loss_mask: str | None = None
    """The column that says which tokens have loss."""


class Fim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fill in the middle: some texts are cut in three, and their middle comes last."""

    rate: float
    """The part of the texts that are cut, from 0 to 1; a hash of the text chooses them, the same in each epoch."""
    spm: float = 0.5
    """The part of these whose suffix comes before their prefix; the others have the prefix first."""
    ids: tuple[int | str, int | str, int | str]
    """The tokens that stand for prefix, middle and suffix, in this order: ids, or names of tokens."""
    by: Literal["token", "character"] = "token"
    """What a text is cut between. Parts that are cut between characters are encoded one by one."""
    eod: int | None = None
    """The id that ends a document inside a row of ids; it stays, and what lies between two is cut by itself."""
    split: int | None = None
    """The id between the files of a document, which are cut one by one where the document would be."""
    fragment_rate: float | None = None
    """The part of these files that are cut, from 0 to 1; with `split`."""


# --- What a recipe says of items in the rows of a source, as values.
#
# They check nothing; see items.py.


class ItemWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the items of one kind lie in the rows of a source, and what stands for them in the text. Each kind has a
    struct of its own that adds its options."""

    kind: ClassVar[str]
    """The kind, as the table of kinds has it."""
    processor: str | None = None
    """The folder of a model, relative to the recipe's, whose processor says what the other keys leave open. None in a
    recipe that was read: its values stand in the place of the key."""
    column: str
    """The column that holds them: their bytes, a struct of `bytes`, or with `folder` paths of files. With `webdataset`
    the suffix of a member, as `jpg`, or several as `jpg|png`."""
    place: str | None = None
    """The column of the places of items in the list of texts of `interleaved`: an item stands before the text of this
    number. None: the list itself has a null, or a part, for each item."""
    folder: str | None = None
    """The column holds paths of files, relative to this folder, which is relative to the recipe's."""
    token: int | str
    """The token that stands for a part of an item, as often as the item has tokens: an id, or the name of a token."""
    before: int | str | None = None
    """A token before the tokens of each item; None: nothing."""
    after: int | str | None = None
    """A token after the tokens of each item; None: nothing."""
    most_items: int | None = None
    """A row with more items of the kind is a bad row; None: any number."""
    most_item_tokens: int | None = None
    """A row whose items of the kind are more tokens together is a bad row, before it is packed; None: any number."""
    augment: str | None = None
    """`module:function` of the user's: (decoded item, numpy.random.Generator) -> the item as it is in this epoch."""
    marker: str
    """Where an item goes in the text. A text without markers has its items before it."""


class Tiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Square tiles and a thumbnail, as InternVL cuts them."""

    size: int = 448
    """Pixels of a tile's side; a multiple of patch x merge."""
    min: int = 1
    """Fewest tiles, the thumbnail not counted."""
    max: int = 12
    """Most tiles, the thumbnail not counted; at most 64."""


class Anyres(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small picture of the whole and tiles of a canvas, as LLaVA-NeXT makes them."""

    size: int = 336
    """Pixels of a tile's side, at least patch; what is left of it behind whole patches is not seen, as an encoder whose
    patches do not overlap leaves it out."""
    most_tiles: int | None = None
    """Tokens of tiles that are more than so many tiles would give are made fewer, as LLaVA-OneVision does with 9; the
    model shrinks the grid. None: they are as many as the canvas gives."""
    canvases: tuple[str, ...] | None = None
    """Sizes of canvas, HEIGHTxWIDTH, each a multiple of `size`. None: one tile by two, two by one, two by two, three by
    one, one by three."""


class Fixed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One picture of a size that is the same for all images, as CLIP, SigLIP and Gemma 3 take it."""

    height: int
    """Pixels, at least patch; what is left behind whole patches is not seen."""
    width: int
    """Pixels, likewise."""
    fit: Literal["stretch", "crop", "pad"] = "stretch"
    """An image is resized to it as it is; or its shorter side is, and the middle is kept; or it is made a square with
    borders of the color `fill` first."""
    shortest: int | None = None
    """With `crop`, pixels of the shorter side after resizing; at least height and width. None: the larger of these."""


class Images(ItemWords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The images of a source."""

    kind: ClassVar[str] = "image"
    marker: str = "<image>"
    patch: int = 14
    """Pixels of a patch's side."""
    merge: int = 2
    """Patches of the side of a block that becomes one token; not with `anyres`."""
    min_pixels: int | None = None
    """Smaller images are enlarged; only where none of the next four keys is given. None: 3136."""
    max_pixels: int | None = None
    """Larger images are shrunk; only where none of the next four keys is given. None: 1003520."""
    tiles: Tiles | None = None
    """Cut tiles."""
    anyres: Anyres | None = None
    """Cut tiles of a canvas."""
    fixed: Fixed | None = None
    """One picture of this size."""
    size: str | None = None
    """`module:function` of the user's: (width, height) -> ((rows, columns) of patches, tokens), or with a third part
    ((width, height), (left, top)): what it is resized to, and where on the canvas of patches that is laid."""
    resize: Literal["pillow", "tensor"] = "pillow"
    """Whose arithmetic resizes and normalises: Pillow's, or that of torchvision on tensors of bytes. Some 3 % of the
    bytes differ, by one level."""
    filter: Literal["bicubic", "bilinear"] = "bicubic"
    """What pixels are weighted by."""
    fill: tuple[int, int, int] = (0, 0, 0)
    """The color of borders, 0 to 255."""
    frames: int = 1
    """How often the tower of the model takes an image, as if it were frames of a video: 2 of Qwen's."""
    mean: tuple[float, float, float] | None = None
    """Red, green and blue, from 0 to 1; subtracted by `open_tower`."""
    deviation: tuple[float, float, float] | None = None
    """What `open_tower` divides by then."""
    tower: Literal["rows", "pictures"] = "rows"
    """What `open_tower` gives: rows of patches, or whole pictures of one size, channels first."""
    alpha: Literal["white", "drop"] = "white"
    """What becomes of transparent pixels: they turn white, or keep the color that they hide."""
    most_pixels: int = 89_478_485
    """An image whose header says more is refused, before it is decoded; at most 2^30."""


# --- The `loaders` of a recipe, as values.


class Autoscale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loaders that follow the coming load of the plan."""

    min: int
    """Loaders that suffice for the first steps of the run; there are never fewer. With `job`: of each node."""
    max: int
    """There are never more; likewise."""


class Loaders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which processes make the steps, and what of each node they may take; it does not affect the order."""

    where: (
        tuple[Literal["node", "job", "ray", "remote"], ...] | Literal["in_process", "node", "job", "ray", "remote"]
    ) = "node"
    """`node`: in one process for all leaders of a node. `in_process`: in threads of each leader. `job`, `ray` and
    `remote`: as `node`, but that process opens no data file: it asks loaders, which the job runs on each of its nodes,
    or on a Ray cluster, or which `torchmix serve` runs. `[node, job]`, `[node, ray]` and `[node, remote]`: that process
    reads while `cpu` and `memory` suffice, and asks loaders for the rest."""
    processes: int | Literal["auto"] = 1
    """Loaders: of each node with `job`, of the cluster with `ray`, of `torchmix serve` with `remote`. `auto`: as many
    as the profile asks for, each with its sources."""
    spares: int = 0
    """Processes of a node that wait, with their imports done, to replace one that is lost; not with `in_process`."""
    cpu: int | None = None
    """Processors of a node for all of this, threads of tokenizers included; None: those that the job may use. With
    `ray`: of all loaders on the cluster; None: those of the cluster. Not with `in_process`."""
    memory: str | int | None = None
    """Bytes, likewise: text such as 8GiB, or a number."""
    endpoints: str | tuple[str, ...] | None = None
    """Where remote loaders are: `tcp://cpu-[0-3]:[7700-7707]`, a folder where they register, or several of these."""
    autoscale: Autoscale | None = None
    """With `job`, `ray` and `remote`: bounds on the number of loaders, which the job or `torchmix serve` starts and
    ends by the load that is coming."""
    transform_at: Literal["auto", "loader", "worker"] | dict[str, Literal["auto", "loader", "worker"]] | None = None
    """With `job`, `ray` and `remote`, who maps and tokenizes: the loaders, which None means; or the node worker, which
    then reads the files itself; or whichever costs less by the profile. One word, or a word for some sources; the
    others go by `auto`. Where the node reads first, `auto` and None mean that it does so, and the words that a source
    is read by the one or by the others alone."""
    address: str | None = None
    """With `ray`: `HOST:PORT` of the cluster, or `auto`, which None means: that of RAY_ADDRESS, or of the first rank's
    machine."""
    keys: str | None = None
    """The folder of this machine's keys for remote loaders, or a file of it; None: loaders of this machine, no keys."""

    @property
    def asked(self) -> str:
        """Which loaders are asked, `job`, `ray` or `remote`; empty: none."""
        last = self.where if isinstance(self.where, str) else self.where[-1]
        return "" if last in ("in_process", "node") else last

    @property
    def num_told(self) -> int | None:
        """Loaders, where the recipe says how many; None: the profile does."""
        return None if self.processes == "auto" or self.autoscale is not None else self.processes

    @property
    def is_node_first(self) -> bool:
        """Whether the node reads what its processors and its memory suffice for, and loaders the rest."""
        return not isinstance(self.where, str)


# --- Balance and modules, as values of a recipe.
#
# None of it changes which pieces are in which sample.


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of the transformer; the cost of a sample follows from them."""

    layers: int
    """Transformer layers, at least 1."""
    hidden: int
    """Width of the residual stream."""
    ffn: int
    """Width inside the feed-forward block."""
    heads: int
    """Attention heads."""
    kv_heads: int | None = None
    """Key and value heads, a divisor of `heads`; None for as many as `heads`."""
    vocab: int | None = None
    """Size of the vocabulary; None: the recipe's `vocab_size`, if it has one. 0 leaves the output layer out of the
    cost."""
    experts_per_token: int | None = None
    """Experts that compute each token, each of width `ffn`; None: the feed-forward block is dense."""


class FittedCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of a sample as it was measured; `torchmix calibrate` fits it to timings."""

    per_token: int
    """Cost of each token of a sample, padding included."""
    per_pair: int
    """Cost of the square of the tokens of each piece."""


class Context(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many ranks share a document, with `packing: {method: whole}`: planned for each microbatch."""

    rank_tokens: int
    """Most tokens of a rank in a microbatch, padding included; at least 1."""
    sizes: tuple[int, ...] | None = None
    """Ranks of a run, ascending, each a divisor of the next. None: the powers of two below dp x cp, and dp x cp."""
    align: int = 1
    """Each rank has a multiple of this many tokens of each document's halves: tp with sequence parallelism."""
    per_exchanged: int | None = None
    """Cost of a token that a rank gets from another one of its run; None: 1/128 of a token's linear cost."""
    per_microbatch: int = 0
    """Cost of a microbatch beside what it holds."""
    microbatches_of: int = 1
    """A step has a multiple of so many microbatches, as virtual stages of a pipeline need: at least 1."""


class Balance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rank and microbatch a sample goes to; never which samples there are."""

    method: str = "none"
    """`rows` gives all ranks similar work in every microbatch and needs `model`; `none` keeps hash order. Also `lpt`,
    `karmarkar_karp`, `zigzag`, or `module:function`."""
    level: Literal["both", "bucket", "bin"] = "both"
    """What may change: rank and microbatch of a sample, its rank alone (`bucket`), or its microbatch alone (`bin`)."""
    objective: Literal["rows", "max", "rank", "pipeline"] = "rows"
    """What a placement is judged by; one that is worse than hash order is not used."""
    microbatches: Literal["unimodal", "descending", "keep"] = "unimodal"
    """The order of microbatches: small ones at both ends, costly ones first, or as the method gives them."""
    group_size: int | None = None
    """Neighbouring ranks that balance among themselves, at least 1; None: all ranks do."""
    model: Model | None = None
    """Dimensions for the cost of a sample."""
    cost: FittedCost | None = None
    """The cost as it was measured, instead of what follows from `model`."""
    strategy: str | None = None
    """`module:function` of a strategy, which decides instead of these keys; importable wherever steps are planned."""
    broadcast_at: Literal["TP", "CP", "PP"] | None = None
    """The axis along which the trainer sends tokens and labels: only its first rank gets them, at `CP` whole samples,
    which the trainer cuts, at `PP` labels, too."""
    context: Context | None = None
    """Runs of ranks for documents of any length; of `packing.method: whole`, and only there."""


class EncoderModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of the transformer that a module runs; the cost and the memory of an item follow from them."""

    layers: int
    """Transformer layers, at least 1."""
    hidden: int
    """Width of the residual stream."""
    ffn: int
    """Width inside the feed-forward block."""
    heads: int
    """Attention heads."""
    kv_heads: int | None = None
    """Key and value heads, a divisor of `heads`; None for as many as `heads`."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """Two matrices in the feed-forward block, or three."""
    patch: int | None = None
    """Pixels of the side of a unit that is a patch of an image, at least 1; None: units are no patches."""
    window: int | None = None
    """What attends together in most layers: the side of a window in pixels, with `patch`, else a number of units. None:
    all units of an item attend together in all layers."""
    full_layers: tuple[int, ...] = ()
    """Layers, from 0, in which all units of an item attend together although there is a window."""
    merge: int = 1
    """Units side by side that become one row of the output, at least 1: merge x merge units a row."""
    out: int | None = None
    """Width of the output after the merge, the hidden size of the backbone; None: there is no merging block."""


class Module(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the model beside the backbone, with a grid of consumers of its own."""

    items: str = "document"
    """What it computes: `document`, pieces of documents, or a kind of items in documents, as `image`."""
    sources: tuple[str, ...] | None = None
    """Sources whose items it computes; None: all that have such items."""
    sizes: str = "tokens"
    """The size column of the catalog that the cost is a function of."""
    axis: Literal["DP", "CP", "WORLD"] = "WORLD"
    """Who computes: each replica, each replica's slice of the sequence, or each rank of the job by itself."""
    method: str = "lpt"
    """How items are shared out: a method of balance, or `module:function`."""
    scope: Literal["step", "microbatch"] = "step"
    """Whether all items of a step are computed together, or those of each microbatch of the backbone."""
    group_size: int | None = None
    """Neighbouring consumers that share items among themselves, at least 1; None: all do."""
    cap: str | int | None = None
    """Most bytes of activations of one consumer at a time, text such as 4GiB or a number; needs `model`."""
    near_text: str | None = None
    """With `lpt`, how much costlier the costliest consumer may be so that items are computed in the replica that trains
    on their text: a percentage, or `always`, whatever it costs. None: where items go does not depend on their text."""
    decode_at: Literal["loader", "worker", "rank"] | None = None
    """Who decodes items: shared loaders, whoever makes the steps, or the process of the rank that encodes them. None:
    where fewer bytes travel."""
    model: EncoderModel | None = None
    """Dimensions for the cost of an item; None: the cost is the size."""


# --- The Structs of sources, the mixture and the recipe itself.
#
# Structs built in Python do not check themselves; a `Recipe` returned by `load_recipe` or `check_recipe` has no fault
# that can be found without opening data.

RECIPE_VERSION = 1
MAX_BATCH_TOKENS = 2**30
"""The draw keeps exact debts in int64: share (32 bits) x asked tokens must stay below 2**63."""
MAX_NAME_BYTES = 200
"""A source's name is also the name of a folder in the catalog."""


class RampStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of the global batch from a step on."""

    from_step: int
    """The first step of this size; 0 in the first stage, rising from stage to stage."""
    samples: int
    """Samples of a global batch, over all ranks; at least 1."""
    length: int | None = None
    """Tokens of a sample from this step on, a multiple of `batch.length`; None: as many as before, and that of the
    batch in the first stage."""


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a global batch; its capacity is samples x length tokens, at most 2**30."""

    samples: int | tuple[RampStage, ...]
    """Samples of a global batch, over all ranks; at least 1. Or the stages of a ramp over steps, see `ramp.py`."""
    length: int
    """Tokens of a sample, padding included; at least 2. Later stages of a ramp may have longer ones."""


class PathProperty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A property that follows from the path of a row's file."""

    path: str
    """A regular expression with one group, searched in the path as the catalog has it; the group's text is the value,
    and null where nothing matches."""


class Quantiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cut of a source into children of about equal numbers of rows, by the order of a number."""

    column: str
    """A property of the source that is a number; rows where it is null are in no child."""
    quantiles: int
    """Number of children, 2 to 1000. They are named q1, q2, ..., from the lowest values to the highest."""


class PackingOfSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the documents of one source are packed; what is None is as the recipe's `packing` says."""

    method: Literal["concat"] | None = None
    """`concat`: with `packing.method: best_fit`, its documents flow into what whole documents leave of the samples, and
    are cut where a sample ends."""
    overflow: Overflow | None = None
    """What happens to a document that is too long."""
    max_length: int | None = None
    """A document of more tokens is too long, also where a sample would hold it; None: what a sample holds."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One named collection of documents: which files, which column, how often."""

    path: str | tuple[str, ...]
    """A file or a glob, or several; relative to the recipe's directory. With `megatron`, also a dataset's prefix."""
    format: str | None = None
    """What the files are, a key of `source_format.FORMATS`; None: by their names. `megatron`: pairs of .bin and .idx,
    which have no columns. Of `jsonl`, lines of JSON, a column is a key of each line."""
    text: str | None = None
    """Name of a string column, tokenised by `tokenizer`. Exactly one of `text`, `tokens`, `messages` and `interleaved`;
    none with `megatron`."""
    tokens: str | None = None
    """Name of a list-of-integers column, used as it is."""
    messages: str | None = None
    """Name of a column of chats: a list of messages, each with `role` and `content`, or `from` and `value`; or JSON."""
    chat: Chat | None = None
    """How messages become documents, and which have loss; None: the template `plain`, loss on the assistant's."""
    interleaved: str | None = None
    """Name of a column of lists of texts and images, in their order; see `transform.documents.interleaved`."""
    loss_mask: str | None = None
    """With `tokens`, the column that says which of them have loss: lists as long as those, in which 0, false and
    numbers below 0 mean that the model is not trained to predict the token."""
    tokenizer: str | None = None
    """How text becomes ids. `bytes`: UTF-8 bytes are 0 to 255, 256 ends each document. Or the path of a tokenizer.json,
    or `tiktoken:` and the name of an encoding. Required where the column holds no ids, and only there."""
    begin_id: int | str | None = None
    """Token before the ids of each text: an id, or the name of a token; None: no token. Not with `bytes`."""
    end_id: int | str | None = None
    """Token after the ids of each text, written in the same way."""
    map: str | None = None
    """A function of one's own, `module:function`, that every row of the column goes through before it is tokenized, or
    used as tokens; see `transform.maps`. None: rows are used as they are."""
    fim: Fim | None = None
    """Fill in the middle, of a column of texts; None: texts stay as they are."""
    keep: Literal["tokens"] | None = None
    """`tokens`: an index run keeps the ids that it makes of each row, so that reading makes none. None: it keeps their
    number alone."""
    images: Images | None = None
    """Images in the texts; None: there are none."""
    items: dict[str, Any] | None = None
    """Items in the texts of a kind that the user's code adds, by kind: the options of each. None: there are none."""
    reset_id: int | None = None
    """An id that ends a document inside a row, for example an EOD between joined texts. `boundaries`, `positions` and
    `reset_loss` apply after each such token. It alters no sample. None: no id ends a document."""
    packing: PackingOfSource = PackingOfSource()
    """How its documents are packed, where that is not as the recipe's `packing` says."""
    documents: tuple[str, str] | None = None
    """Where the used rows begin and end, for example `["0%", "96.9%"]` of all rows in order; None: all are used."""
    id: str | None = None
    """A column that names each row, of text or whole numbers. Tables of further properties are joined by it, and
    hold-outs choose rows by it. None: rows have no names."""
    properties: tuple[str, ...] | dict[str, str | PathProperty] | None = None
    """Columns of the files that selections and queries may name. Or a mapping: the name of each property to its column,
    or to `{path: REGULAR EXPRESSION}`. They never alter the order of the source."""
    split_by: str | Quantiles | None = None
    """Cuts the source into children, which the mixture names `SOURCE/CHILD`. `dir`: one for each folder below the one
    that all paths share. Or quantiles of a property."""
    max_epochs: int | None = None
    """Passes of training over the source, at least 1, after which it is exhausted; None: no bound."""
    on_exhausted: Literal["error", "renormalise"] = "error"
    """After `max_epochs`: stop with SourceExhausted, or give its share to the other sources."""
    bad_rows: Literal["error", "mask"] = "error"
    """What happens to a row that cannot be read. `error`: the index run or the training run stops. `mask`: a bad row
    that the index finds has no tokens; a row whose page is damaged later becomes padding without loss."""
    max_bad: str | None = None
    """With `mask`, the part of the source that may be bad, for example `1%`; more is an error. Counts rows when the
    source is indexed, and tokens in each epoch of a run. None: 0.1%."""


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """Rows of a source that hold a share of their own; they stay where they are."""

    source: str
    """The source that the rows are of (`from` in YAML)."""
    where: str
    """An SQL expression over the properties of a row. Rows for which it is true are kept; null keeps nothing."""
    overlap: Literal["exclude", "allow"] = "exclude"
    """What happens to rows that another stream of the same source has, too. `exclude`: the wider of the two leaves them
    to the narrower. `allow`: both have them."""
    max_epochs: int | None = None
    """Passes of training over the kept rows, at least 1, after which the selection is exhausted; None: no bound."""
    on_exhausted: Literal["error", "renormalise"] = "error"
    """As that of a source."""


Share = str | int | float
"""A percentage (`70%`) or a fraction (`1/3`) as text, or a number. Numbers are ratios, and never mix with text."""


class Cells(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of several properties at once, in place of the shares of children."""

    of: tuple[str, ...]
    """Names of the sources, selections and children of sources whose rows are in the cells."""
    shares: dict[str, dict[str, Share]]
    """Property to the shares of its values. The property `source` has the names of `of` as its values."""


class InnerFlat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flat inside a flat: the same as its members in its place. Bounds on epochs stand on the outermost flat, which
    has the one order that they count."""

    flat: tuple[str | InnerFlat, ...]
    """Names of sources and selections, and flats of them."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several children of a mixture, with one share for all of them together; or a flat, whose rows are one stream."""

    share: Share | None = None
    """Share of the group above. Left out where that group shares by sizes."""
    children: dict[str, Share | Group] | tuple[str, ...] | None = None
    """Name to share in this group, or to a nested group. A list of names where the children share by sizes."""
    flat: tuple[str | InnerFlat, ...] | None = None
    """In place of `children`: names of sources and selections whose rows are shuffled as if they were one source. A
    flat among them stands for its members."""
    proportional: str | int | float | None = None
    """Children share in proportion to their tokens to this power, in [0, 1]; they then have no shares of their own."""
    cells: Cells | None = None
    """In place of `children`: shares of several properties at once."""
    max_epochs: int | None = None
    """Passes of training over a flat, at least 1, after which it is exhausted; None: no bound. Groups have none."""
    on_exhausted: Literal["error", "renormalise"] = "error"
    """As that of a source, for a flat."""


class EpochPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place of the run: where a stream has been gone through."""

    epochs: int
    """How often it has, at least 1."""
    of: str
    """Name of the stream: a source, selection, child, flat or cell that has a share."""


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"start": "from"}):
    """New shares from a place of the run on."""

    start: str | EpochPlace
    """Where the change begins (`from` in YAML): `12T tokens` or `5000 steps`, or with the first step after an epoch."""
    to: str | None = None
    """Where the new shares are reached, along `shape`; None: they hold at once. It counts from an epoch."""
    shape: str = "line"
    """How they are reached: `line` is straight; `cosine` is slow at both ends."""
    set: dict[str, Share] | None = None
    """Path of a child, with dots (`text.german`), to its share of its group; its siblings keep their ratios in what is
    left."""
    mixture: dict[str, Share | Group] | None = None
    """A whole mixture that replaces the one before."""
    file: str | None = None
    """A YAML file, relative to the recipe; its `mixture` replaces the one before."""


class Dynamic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares that a policy decides while the run continues, from the losses that the trainer reports."""

    policy: str
    """`ado`, `odm`, `exp3`, `file`, or `module:Class` of your own."""
    at: str | None = None
    """Path of the group whose children it decides, with dots; None: the whole mixture."""
    every: str = "50 steps"
    """From one decision to the next."""
    lag: str = "16 steps"
    """From a decision to the first step that it holds for: so many steps can be prepared ahead."""
    within: tuple[str, str] = ("0.5x", "2x")
    """Bounds of a share, as multiples of the schedule's."""
    on_error: Literal["keep", "stop"] = "keep"
    """What a policy that fails does: it changes no share and is logged, or the run stops."""
    on_missing: Literal["refuse", "constant"] = "refuse"
    """What a resume without its log does: it is refused, or continues with the shares of the state."""
    decisions: str = "./decisions"
    """Folder of the log, on a disk that all nodes see; no part of the order."""
    options: dict[str, int | float | str] = {}
    """What the policy is made with."""


class Packing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How documents become samples of fixed length."""

    method: Literal["concat", "best_fit", "pad", "whole"] = "best_fit"
    """`concat` cuts the stream every `length` tokens; `best_fit` keeps documents whole; `pad` gives each a sample;
    `whole` gives each a sample of its own length, and needs `balance.context`."""
    overflow: Overflow = "split"
    """What happens to a document longer than a sample; applied before the draw."""
    boundaries: Literal["document", "none"] = "document"
    """Where attention stops: with `document` at the ends of documents, with `none` at the ends of samples only."""
    positions: Literal["document", "sample"] | None = None
    """Where positions count from 0: at each document, or at each sample. None: at documents if `boundaries` is
    `document`, else at samples."""
    reset_loss: Literal["mask", "keep"] = "mask"
    """Whether a `reset_id` inside a document is trained to predict the token after it; `mask`: it is not. The last
    token of a document never is."""
    align_tokens: int = 8
    """Pieces are padded to a multiple of this many tokens. 2 x cp, or a multiple of it, lets CP slice each document.
    It must divide `length`. `concat` pads nothing and ignores it."""


class Shuffle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a row may travel."""

    method: Literal["page", "row", "none"] = "page"
    """`page`: permutes the rows of windows, whose pages come from all over the source. `row`: permutes all rows of a
    source. `none`: keeps the order of the files."""
    window_pages: int = 256
    """Most pages of a window, at least 1."""
    window_bytes: str | int = "64MiB"
    """Most decoded bytes of a window: text such as 64MiB or 100MB, or a number of bytes."""


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How bytes are read; it does not affect the order."""

    cache: str | int = "1GiB"
    """Bytes of decoded pages kept in each process that reads, for all sources together: text such as 1GiB, or a
    number."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources and shares of validation or test, where `split` does not cut them from the training sources."""

    sources: dict[str, Source]
    """Sources by name; no name is in another part."""
    mixture: dict[str, Share | Group]
    """Share of each; the sum is 100 %."""
    selections: dict[str, Selection] = {}
    """Selections by name. In a file they stand among the sources."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides what is trained on, in which order."""

    version: int
    """Version of the recipe's format: 1."""
    seed: int
    """Seeds every permutation and hash; in [0, 2**63)."""
    batch: Batch
    """The size of a step."""
    sources: dict[str, Source]
    """Sources by name. The name is the identity: a renamed source is another source. Their order means nothing."""
    selections: dict[str, Selection] = {}
    """Selections by name; no name is that of a source. In a file they stand among the sources."""
    mixture: dict[str, Share | Group]
    """Share of trained tokens of each source or group, as text that sums to 100 % (`70%`, `1/3`), or as ratios."""
    unit: Literal["tokens", "documents"] = "tokens"
    """What shares count: trained tokens, or documents, long and short ones alike."""
    schedule: tuple[Change, ...] = ()
    """How the mixture changes over training, in the order of places."""
    dynamic: Dynamic | None = None
    """A policy that decides shares while the run continues."""
    split: tuple[int | float, ...] | None = None
    """Weights of train, validation and test: each source's rows are cut in this ratio, as Megatron's `--split` does."""
    hold_out: dict[str, dict[str, str]] | None = None
    """Rows of training sources that `validation` or `test` has instead: part, to source, to a percentage of its rows. A
    hash chooses them, so a row stays where it is when others are added."""
    validation: Evaluation | None = None
    """What validation reads, instead of `split`."""
    test: Evaluation | None = None
    """What test reads, instead of `split`."""
    deny: tuple[str, ...] = ()
    """Parquet files that name documents which no part gives: `source` and `row`, or `id`."""
    catalog: str = "./catalog"
    """Folder of the index, relative to the recipe's directory; or its address in a store."""
    packing: Packing = Packing()
    """Documents to samples."""
    balance: Balance = Balance()
    """Samples to ranks."""
    modules: dict[str, Module] = {}
    """Parts of the model beside the backbone, by name."""
    shuffle: Shuffle = Shuffle()
    """Order inside a source; fixed when the source is indexed."""
    read: Read = Read()
    """Memory for reading."""
    loaders: Loaders = Loaders()
    """Processes for reading; a call or a flag may override it."""
    vocab_size: int | None = None
    """Size of the model's vocabulary, without padding: every token is below it. None: tokens are not checked."""
    starve: Literal["error", "allow"] = "error"
    """What `torchmix check` makes of a stream that gives less than a sample in the whole run."""
    per_token_loss: Literal["warn", "require"] = "warn"
    """What an adapter does where microbatches differ in tokens and its trainer would weight them equally."""
