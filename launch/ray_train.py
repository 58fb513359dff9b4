"""Run any recipe unchanged on Ray Train: change the number of workers, GPU use, and the maximum number of failures.

    python launch/ray_train.py --workers 8 --gpu --max-failures 3 recipe=llama3_8b run.dir=/shared/runs/mine

Ray creates the process group, and the trainer uses it.  After a failure, the run resumes from its newest checkpoint in
run.dir, even with a different number of workers; all nodes must be able to access that folder.  To stop the run after a
save, create a file named `notice` in the folder.  Requires `pip install 'meshtrainer[ray]'`.
"""

import argparse
import os
import sys

import ray.train
import ray.train.torch


def train(job):
    """Train as one of the workers, and report to Ray.  Ray requires all workers to report equally often."""
    os.chdir(job["folder"])  # Ray starts workers in a different folder
    sys.path.insert(0, job["folder"])
    from trainer import Trainer, load_config

    config = load_config(job["recipe"], job["overrides"])

    class Reporting(config.spec.trainer_class(Trainer)):
        def on_step(self, record):
            super().on_step(record)
            if record.step % config.log.every == 0:
                ray.train.report({"step": record.step, "loss": record.loss})

    trainer = Reporting(config)
    code = trainer.fit()
    newest = ray.train.Checkpoint(os.path.join(config.run_dir, "checkpoints", f"step_{trainer.state.step:08d}"))
    is_main = ray.train.get_context().get_world_rank() == 0
    # Ray copies the checkpoint to --storage; it does not accept a reference to one stored elsewhere.
    ray.train.report({"step": trainer.state.step, "exit_code": code}, checkpoint=newest if is_main else None)
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("--storage", help="folder for Ray's own state, accessible from all nodes")
    options, arguments = parser.parse_known_args()
    recipe = next(item.partition("=")[2] for item in arguments if item.startswith("recipe="))
    overrides = [item for item in arguments if not item.startswith("recipe=")]
    failures = ray.train.FailureConfig(max_failures=options.max_failures)
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": os.getcwd(), "recipe": recipe, "overrides": overrides},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=ray.train.RunConfig(storage_path=options.storage, failure_config=failures),
    ).fit()
    sys.exit(result.metrics["exit_code"])  # 75: stopped on request; start it again to resume
