from types import SimpleNamespace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.planner import ParameterConstraints

from fused_ops import FusedOptimizer
from models.dlrm.sharded_embeddings import FusedEmbeddingBagCollectionSharder, FusedShardedEmbeddingBagCollection
from tests.ranks import run_ranks
from tests.trainers import tiny

MODEL = {"embedding_dim": 16, "table_rows": [50, 60, 70, 80], "multi_hot_sizes": [1, 3, 2, 4], "bottom_mlp": [16]}


def _embed_all(configs):
    return [_embed(config, _constraints()) for config in configs]


def _embed(config, constraints):
    """Pooled embeddings, names and state of a collection whose tables 1 and 2 are cut into columns."""
    import torch.distributed as dist

    from trainers.dlrm import engine as ddp

    planned = ddp.build_plan
    ddp.build_plan = lambda *args, **kwargs: planned(*args, constraints=constraints, **kwargs)
    engine = ddp.DDPEngine(config)
    ddp.build_plan = planned
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = tiny.part(tiny.global_batch(config.model, 0, 9), 9 * rank // world, 9 * (rank + 1) // world)
    distributed = engine.indices.finish(engine.indices.send(engine.indices.start(batch.sparse)))
    collection = engine.model.module.sparse_arch.embedding_bag_collection
    pooled = collection.compute_and_output_dist(distributed.context, distributed.indices).wait()
    pooled.values().square().sum().backward()
    features = [pooled[key].detach().clone() for key in sorted(pooled.keys())]
    state = engine.model.state_dict()
    weights = {k: [s.tensor.clone() for s in v.local_shards()] for k, v in state.items() if "embedding_bags" in k}
    states = {
        k: [s.tensor.clone() for s in v.local_shards()]
        for k, v in engine.optimizer_state().items()
        if "embedding_bags" in k
    }
    keys = pooled.keys()
    contexts = [s.sharding_type for s in collection.module_sharding_plan.values()]
    engine.close()
    return features, weights, states, keys, contexts, sorted(state)


def _constraints():
    """Two sharding groups: whole tables and tables in slices of 4 columns, several of one table on one rank."""
    cut = {"compute_kernels": ["fused"], "sharding_types": ["column_wise"], "min_partition": 4}
    return {
        **{
            f"table_{t}": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise"]) for t in (0, 3)
        },
        **{f"table_{t}": ParameterConstraints(**cut) for t in (1, 2)},
    }


def test_equals_torchrec_with_slices_and_whole_tables(tmp_path):
    """Outputs, weights and optimizer states after one update, state-dict names; three ranks, nine samples."""
    configs = [
        tiny.config(tmp_path, comm, model={**MODEL, "pooling": pooling}, optim={"name": optimizer, "lr": 0.1})
        for pooling, optimizer in (("sum", "adagrad"), ("mean", "rowwise_adagrad"))
        for comm in ("baseline", "fused")
    ]
    for rank in run_ranks(3, _embed_all, configs, timeout=120):
        for baseline, fused in (rank[:2], rank[2:]):
            assert sorted(fused[4]) == ["column_wise", "column_wise", "table_wise", "table_wise"]
            assert fused[3] == ["cat_0", "cat_1", "cat_2", "cat_3"], "the collection's own order, whatever the sharding"
            for part in range(3):
                torch.testing.assert_close(fused[part], baseline[part], rtol=1e-5, atol=1e-6)
            assert fused[5] == baseline[5]


def test_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="can't be fused into backward; allowed: sgd, adagrad, rowwise_adagrad, adam"):
        FusedEmbeddingBagCollectionSharder({"optimizer": EmbOptimType.LAMB})


def _kernel(tables):
    states = [[torch.full((rows, 4), 10.0 * t), torch.full((rows, 4), 10.0 * t + 1)] for t, rows in tables]
    iteration = torch.tensor([7])
    return SimpleNamespace(emb_module=SimpleNamespace(split_optimizer_states=lambda: states, iter=iteration))


@pytest.mark.parametrize("kernels", [[], [_kernel([(0, 5), (1, 6)]), _kernel([(2, 7)])]])
def test_adams_states_are_fbgemms_own(kernels):
    """All first moments, all second moments, the step: what FusedOptimizer takes. FBGEMM has no Adam on the CPU to ask."""
    params = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1, "eps": 1e-8}
    infos = {"table_wise": [SimpleNamespace(fused_params=params)]}
    collection = SimpleNamespace(sharding_type_to_sharding_infos=infos, _kernels=kernels, _device=torch.device("cpu"))
    optimizer = FusedShardedEmbeddingBagCollection._make_optimizer(collection)
    tables = [torch.zeros(rows, 4) for rows in (5, 6, 7)] if kernels else []
    assert [s.shape for s in optimizer.states] == [s.shape for s in FusedOptimizer.make_states("adam", tables)]
    assert [float(s[0, 0]) for s in optimizer.states[:-1]] == ([0, 10, 20, 1, 11, 21] if kernels else [])
    if kernels:
        assert optimizer.states[-1] is kernels[0].emb_module.iter
