"""Streams of tasks, the partitioners that share them among clients, and small data that needs no network."""

from lightning_fcl.data.digits import digit_domains as digit_domains
from lightning_fcl.data.digits import load_digit_folder as load_digit_folder
from lightning_fcl.data.dirichlet import ExtendedDirichlet as ExtendedDirichlet
from lightning_fcl.data.dirichlet import LabelDirichlet as LabelDirichlet
from lightning_fcl.data.dirichlet import QuantityDirichlet as QuantityDirichlet
from lightning_fcl.data.events import EventPosts as EventPosts
from lightning_fcl.data.events import cue_posts as cue_posts
from lightning_fcl.data.events import drawn_events as drawn_events
from lightning_fcl.data.events import event_stream as event_stream
from lightning_fcl.data.events import hash_tokens as hash_tokens
from lightning_fcl.data.events import load_event_folder as load_event_folder
from lightning_fcl.data.exemplars import Exemplars as Exemplars
from lightning_fcl.data.factories import digit_stream as digit_stream
from lightning_fcl.data.factories import image_stream as image_stream
from lightning_fcl.data.images import ImageSets as ImageSets
from lightning_fcl.data.images import load_images as load_images
from lightning_fcl.data.partition import IID as IID
from lightning_fcl.data.partition import ByDomain as ByDomain
from lightning_fcl.data.partition import Examples as Examples
from lightning_fcl.data.partition import NaturalClients as NaturalClients
from lightning_fcl.data.partition import Partitioner as Partitioner
from lightning_fcl.data.partition import Shards as Shards
from lightning_fcl.data.plan import PartitionPlan as PartitionPlan
from lightning_fcl.data.stream import TaskStream as TaskStream
