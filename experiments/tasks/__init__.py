"""A task is data, loss and evaluation for n workers; anything with these members is one, wherever it is defined.

```
n                                     workers
initial() -> (d,)                     the common start, in the task's dtype
gradient(x, workers, step)            x (m, d), workers (m,) int64, step of each worker (an int or (m,) int64)
    -> (g (m, d), loss (m,))          borrowed buffers, valid until the next call; the same for the same (seed, worker,
    step)
evaluate(x) -> {name: (k,)}           metrics of each row of x (k, d) on the common test set
```

Optional: ``size`` (training samples of all workers) and ``batch_size`` (samples of a worker's step) give the axes
`epoch` and `samples`; ``report()`` is printed before a run.
"""
