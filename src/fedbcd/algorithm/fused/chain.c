/* Eq. (4) for one device, from mini-batches to new models, without a pass over memory that could be saved.
 *
 * The model is a chain: linear layers, some followed by ReLU, then softmax and the mean cross-entropy. One device after another, one thread:
 * a device's two models stay in the cache for all its steps, and no gradient is ever stored: as soon as a few of its entries are known,
 * the step is taken there.
 *
 * All three products of a layer are one routine, C = A B with B in rows of whole vectors:
 *   outputs' = W inputs'       W is (outputs, inputs), inputs' is (inputs, samples)
 *   dinputs' = W' doutputs'
 *   dW       = doutputs' inputs
 * A prime is a transpose; what the samples have gone through is kept both ways. Every sum runs over its terms in order, so that results
 * do not depend on who else is trained, nor on how many threads there are.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, TALL = 12 };
#elif defined(__AVX2__)
enum { LANES = 8, TALL = 6 };
#else
enum { LANES = 4, TALL = 8 };
#endif
enum { WIDE = 2 * LANES }; /* columns of a tile; rows of B are padded to a multiple of it */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Tile[TALL][WIDE];

typedef struct {
    int64_t inputs, outputs;
    int64_t weight, bias; /* where they begin in the parameters; bias -1: none */
    int64_t relu;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t depth, parameters;
    int64_t samples;        /* in a mini-batch */
    const uint8_t *bytes;   /* the pool of inputs as bytes, with the number that each byte stands for ... */
    const float *number_of; /* (256 of them), or ... */
    const float *floats;    /* ... as it is; the other is NULL */
    const int64_t *targets; /* 0 .. outputs of the last layer - 1 */
    float step, momentum, low, high;
    int64_t contact; /* what x - x_prev is after steps of the penalty alone: KEPT, PULL or RESTART */
} Task;

enum { KEPT, PULL, RESTART };

typedef struct {
    const float *a;
    int64_t a_row, a_column; /* a[m * a_row + k * a_column] */
    const float *b;
    int64_t b_row; /* b[k * b_row + n], n up to the next multiple of WIDE */
    int64_t terms;
} Product;

static int64_t padded(int64_t n) { return (n + WIDE - 1) / WIDE * WIDE; }

static inline __attribute__((always_inline)) void rows_of_tile(const Product *p, int64_t m, int64_t n, int rows, float (*tile)[WIDE]) {
    Vector sum[TALL][2] = {{{0}}};
    const float *a = p->a + m * p->a_row, *b = p->b + n;
    for (int64_t k = 0; k < p->terms; k++) {
        const Vector left = *(const Vector *)b, right = *(const Vector *)(b + LANES);
        for (int i = 0; i < rows; i++) {
            const float value = a[i * p->a_row];
            sum[i][0] += value * left;
            sum[i][1] += value * right;
        }
        a += p->a_column;
        b += p->b_row;
    }
    for (int i = 0; i < rows; i++) {
        *(Vector *)tile[i] = sum[i][0];
        *(Vector *)(tile[i] + LANES) = sum[i][1];
    }
}

/* Entries of the product from row m and column n on, as many rows as fit and are there; returns how many. */
static int64_t tile_of(const Product *p, int64_t m, int64_t n, int64_t rows, float (*tile)[WIDE]) {
    if (rows >= TALL) {
        rows_of_tile(p, m, n, TALL, tile);
        return TALL;
    }
    if (rows >= 4) {
        rows_of_tile(p, m, n, 4, tile);
        return 4;
    }
    rows_of_tile(p, m, n, 1, tile);
    return 1;
}

/* ---------------------------------------------------------------------------------------------------- what becomes of products */

static void forward(const Layer *layer, const float *parameters, const float *inputs_t, int64_t samples, float *outputs_t) {
    const int64_t columns = padded(samples);
    const Product product = {parameters + layer->weight, layer->inputs, 1, inputs_t, columns, layer->inputs};
    Tile tile;
    for (int64_t n = 0; n < columns; n += WIDE)
        for (int64_t m = 0, got; m < layer->outputs; m += got) {
            got = tile_of(&product, m, n, layer->outputs - m, tile);
            for (int64_t i = 0; i < got; i++) {
                const float bias = layer->bias < 0 ? 0.0f : parameters[layer->bias + m + i];
                float *out = outputs_t + (m + i) * columns + n;
                for (int j = 0; j < WIDE; j++) out[j] = tile[i][j] + bias;
                if (layer->relu)
                    for (int j = 0; j < WIDE; j++) out[j] = out[j] < 0.0f ? 0.0f : out[j];
            }
        }
}

/* Of the layer before: its outputs are this layer's inputs; where ReLU has cut them off, they make no difference. */
static void backward(const Layer *layer, const float *parameters, const float *douts_t, const float *inputs_t, int relu, int64_t samples,
                     float *dins_t) {
    const int64_t columns = padded(samples);
    const Product product = {parameters + layer->weight, 1, layer->inputs, douts_t, columns, layer->outputs};
    Tile tile;
    for (int64_t n = 0; n < columns; n += WIDE)
        for (int64_t m = 0, got; m < layer->inputs; m += got) {
            got = tile_of(&product, m, n, layer->inputs - m, tile);
            for (int64_t i = 0; i < got; i++) {
                const float *in = inputs_t + (m + i) * columns + n;
                float *out = dins_t + (m + i) * columns + n;
                for (int j = 0; j < WIDE; j++) out[j] = relu && !(in[j] > 0.0f) ? 0.0f : tile[i][j];
            }
        }
}

/* x <- P_X(ex - eta_x (gradient + gamma_i (ex - z_n))) in the memory of ex, for n parameters. */
static inline __attribute__((always_inline)) void step(const Task *task, float pull, const float *z, const float *gradient, float *ex,
                                                       int64_t n) {
    const float eta = task->step, low = task->low, high = task->high;
    for (int64_t j = 0; j < n; j++) {
        float x = ex[j] - eta * gradient[j];
        if (z) x += pull * (z[j] - ex[j]);
        x = x < low ? low : x;
        ex[j] = x > high ? high : x;
    }
}

static void update(const Task *task, const Layer *layer, const float *douts_t, const float *inputs, const float *z, float pull, float *ex) {
    const int64_t columns = padded(task->samples), width = padded(layer->inputs);
    const Product product = {douts_t, columns, 1, inputs, width, task->samples};
    Tile tile;
    for (int64_t n = 0; n < layer->inputs; n += WIDE) {
        const int64_t here = layer->inputs - n < WIDE ? layer->inputs - n : WIDE;
        for (int64_t m = 0, got; m < layer->outputs; m += got) {
            got = tile_of(&product, m, n, layer->outputs - m, tile);
            for (int64_t i = 0; i < got; i++) {
                const int64_t at = layer->weight + (m + i) * layer->inputs + n;
                if (here == WIDE)
                    step(task, pull, z ? z + at : 0, tile[i], ex + at, WIDE);
                else
                    step(task, pull, z ? z + at : 0, tile[i], ex + at, here);
            }
        }
    }
    if (layer->bias < 0) return;
    for (int64_t m = 0; m < layer->outputs; m++) {
        float gradient = 0.0f;
        for (int64_t r = 0; r < task->samples; r++) gradient += douts_t[m * columns + r];
        const int64_t at = layer->bias + m;
        step(task, pull, z ? z + at : 0, &gradient, ex + at, 1);
    }
}

/* -------------------------------------------------------------------------------------------------------------- the ends of the chain */

static void transpose(const float *in, int64_t in_row, int64_t rows, int64_t columns, float *out, int64_t out_row) {
    enum { BLOCK = 16 };
    for (int64_t c0 = 0; c0 < columns; c0 += BLOCK) {
        const int64_t c1 = c0 + BLOCK < columns ? c0 + BLOCK : columns;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = c0; c < c1; c++) out[c * out_row + r] = in[r * in_row + c];
    }
}

/* The inputs of a mini-batch, one sample a row. */
static void gather(const Task *task, const int64_t *positions, float *out) {
    const int64_t size = task->layers[0].inputs, width = padded(size);
    for (int64_t r = 0; r < task->samples; r++, out += width) {
        if (task->floats)
            memcpy(out, task->floats + positions[r] * size, size * sizeof *out);
        else {
            const uint8_t *sample = task->bytes + positions[r] * size;
            for (int64_t i = 0; i < size; i++) out[i] = task->number_of[sample[i]];
        }
    }
}

/* The mean cross-entropy, and its derivative by the outputs in their place; padding stays out of it. */
static float cross_entropy(const Task *task, const int64_t *positions, float *outs_t) {
    const int64_t columns = padded(task->samples), classes = task->layers[task->depth - 1].outputs;
    const float share = 1.0f / (float)task->samples;
    double loss = 0.0;
    for (int64_t r = 0; r < task->samples; r++) {
        float *out = outs_t + r, most = out[0], total = 0.0f;
        const int64_t target = task->targets[positions[r]];
        for (int64_t c = 1; c < classes; c++) most = out[c * columns] > most ? out[c * columns] : most;
        const float at_target = out[target * columns] - most;
        for (int64_t c = 0; c < classes; c++) total += out[c * columns] = expf(out[c * columns] - most);
        loss += logf(total) - at_target;
        for (int64_t c = 0; c < classes; c++) out[c * columns] *= share / total;
        out[target * columns] -= share;
    }
    for (int64_t c = 0; c < classes; c++) memset(outs_t + c * columns + task->samples, 0, (columns - task->samples) * sizeof *outs_t);
    return (float)(loss / (double)task->samples);
}

/* ------------------------------------------------------------------------------------------------------------------------ the device */

/* Scratch, one piece after the other: for each layer its inputs by samples and by features; then two of derivatives. */
static int64_t by_samples(const Task *task, int64_t l) { return task->samples * padded(task->layers[l].inputs); }
static int64_t by_features(const Task *task, int64_t features) { return features * padded(task->samples); }

static int64_t widest(const Task *task) {
    int64_t most = 0;
    for (int64_t l = 0; l < task->depth; l++) {
        most = task->layers[l].inputs > most ? task->layers[l].inputs : most;
        most = task->layers[l].outputs > most ? task->layers[l].outputs : most;
    }
    return most;
}

static int64_t working_memory(const Task *task) {
    int64_t size = 2 * by_features(task, widest(task));
    for (int64_t l = 0; l < task->depth; l++) size += by_samples(task, l) + by_features(task, task->layers[l].inputs);
    return size;
}

/* So that a library built from another version of this file is not called. */
int64_t fedbcd_task_size(void) { return sizeof(Task); }

/* How many floats of scratch, all 0 before the first use, `fedbcd_train` needs; at the end is room for one model. */
int64_t fedbcd_scratch(const Task *task) { return working_memory(task) + task->parameters; }

/* One step from the extrapolated point `ex`, in its memory; returns the loss there. */
static float one_step(const Task *task, const int64_t *positions, const float *z, float pull, float *ex, float *scratch) {
    float *const douts = scratch, *const dins = douts + by_features(task, widest(task));
    float *inputs = dins + by_features(task, widest(task)), *inputs_t = 0;
    gather(task, positions, inputs);
    for (int64_t l = 0; l < task->depth; l++) {
        const Layer *layer = task->layers + l;
        const int64_t columns = padded(task->samples);
        inputs_t = inputs + by_samples(task, l);
        if (l == 0)
            transpose(inputs, padded(layer->inputs), task->samples, layer->inputs, inputs_t, columns);
        else
            transpose(inputs_t, columns, layer->inputs, task->samples, inputs, padded(layer->inputs));
        float *next = inputs_t + by_features(task, layer->inputs);
        const int last = l == task->depth - 1;
        forward(layer, ex, inputs_t, task->samples, last ? douts : next + by_samples(task, l + 1));
        if (!last) inputs = next;
    }
    const float loss = cross_entropy(task, positions, douts);
    float *now = douts, *before = dins;
    for (int64_t l = task->depth - 1; l >= 0; l--) {
        const Layer *layer = task->layers + l;
        if (l > 0) backward(layer, ex, now, inputs_t, (int)task->layers[l - 1].relu, task->samples, before);
        update(task, layer, now, inputs, z, pull, ex);
        if (l > 0) {
            inputs_t = inputs - by_features(task, task->layers[l - 1].inputs);
            inputs = inputs_t - by_samples(task, l - 1);
            float *swap = now;
            now = before;
            before = swap;
        }
    }
    return loss;
}

/* Eq. (4a): x + zeta (x - x_prev); may be in the memory of x_prev. */
static void extrapolate(const Task *task, const float *x, const float *prev, float *ex) {
    const float zeta = task->momentum;
    for (int64_t j = 0; j < task->parameters; j++) ex[j] = x[j] + zeta * (x[j] - prev[j]);
}

/* Algorithm 1, lines 5-11 (with z), and Algorithm 2, lines 5-11 (z is NULL): K steps from x and x_prev to new_x and new_prev.
 * new_prev may be the memory of prev. `positions` are those of K mini-batches in the pool; K losses go to `losses`. */
static void session(const Task *task, int64_t steps, const int64_t *positions, const float *x, const float *prev, const float *z,
                    float penalty, float *new_x, float *new_prev, float *losses, float *scratch) {
    for (int64_t k = 0; k < steps; k++) {
        float *const ex = (steps - k) % 2 ? new_x : new_prev; /* the last step ends in new_x */
        extrapolate(task, x, prev, ex);
        losses[k] = one_step(task, positions + k * task->samples, z, task->step * penalty, ex, scratch);
        prev = x;
        x = ex;
    }
    if (steps == 1) memcpy(new_prev, prev, task->parameters * sizeof *prev);
}

/* Algorithm 2, lines 14-18: K times x <- P_X(x - gamma_i (x - z_n)), and then x_prev. No entry depends on another, so all steps are taken in
 * one pass. new_prev may be the memory of prev. */
static inline __attribute__((always_inline)) void pull_entries(const Task *task, int64_t contact, int64_t steps, const float *x,
                                                               const float *prev, const float *z, float penalty, float *new_x,
                                                               float *new_prev) {
    const float low = task->low, high = task->high;
    for (int64_t j = 0; j < task->parameters; j++) {
        float now = x[j], last = now;
        for (int64_t k = 0; k < steps; k++) {
            last = now;
            now += penalty * (z[j] - now);
            now = now < low ? low : now;
            now = now > high ? high : now;
        }
        new_x[j] = now;
        new_prev[j] = contact == KEPT ? now - (x[j] - prev[j]) : contact == PULL ? last : now;
    }
}

static void pull_session(const Task *task, int64_t steps, const float *x, const float *prev, const float *z, float penalty, float *new_x,
                         float *new_prev) {
    if (task->contact == KEPT)
        pull_entries(task, KEPT, steps, x, prev, z, penalty, new_x, new_prev);
    else if (task->contact == PULL)
        pull_entries(task, PULL, steps, x, prev, z, penalty, new_x, new_prev);
    else
        pull_entries(task, RESTART, steps, x, prev, z, penalty, new_x, new_prev);
}

static int is_finite(const float *x, int64_t n) {
    int bad = 0;
    for (int64_t j = 0; j < n; j++) bad |= !(x[j] - x[j] == 0.0f);
    return !bad;
}

/* Where something of each device is: in row `rows[i]` of a table, or in row i if that is NULL. */
typedef struct {
    float *first;
    int64_t distance; /* between rows; 0: all devices share one */
    const int64_t *rows;
} Rows;

static float *row(const Rows *table, int64_t i) { return table->first + (table->rows ? table->rows[i] : i) * table->distance; }

typedef struct {
    int64_t devices;
    const int64_t *steps;     /* K_i */
    const int64_t *positions; /* of mini-batches: `most` for every device, of which it takes K_i; NULL: steps of the penalty alone */
    int64_t most;
    Rows x, prev;     /* as they are; may be the memory of new_x and new_prev */
    Rows z;           /* first is NULL: no penalty */
    Rows penalty;     /* gamma_i */
    Rows new_x, new_prev;
    Rows before, after; /* copies of x as it was, and as it is then; first is NULL: not wanted */
    float *losses;      /* (devices, most) */
    uint8_t *finite;    /* whether the new x is */
} Batch;

/* The sessions of all devices of a batch. Several threads may call this with the same batch, each with scratch of its own: `next` is the next
 * device that nobody has taken, 0 at first. */
void fedbcd_train(const Task *task, const Batch *batch, int64_t *next, float *scratch) {
    const size_t size = task->parameters * sizeof(float);
    for (int64_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < batch->devices;) {
        const float *x = row(&batch->x, i);
        float *const new_x = row(&batch->new_x, i);
        float *const copy = batch->before.first ? row(&batch->before, i) : scratch + working_memory(task);
        if (batch->before.first || x == new_x) x = memcpy(copy, x, size);
        const float *const z = batch->z.first ? row(&batch->z, i) : 0;
        const float penalty = *row(&batch->penalty, i);
        if (batch->positions)
            session(task, batch->steps[i], batch->positions + i * batch->most * task->samples, x, row(&batch->prev, i), z, penalty, new_x,
                    row(&batch->new_prev, i), batch->losses + i * batch->most, scratch);
        else
            pull_session(task, batch->steps[i], x, row(&batch->prev, i), z, penalty, new_x, row(&batch->new_prev, i));
        if (batch->after.first) memcpy(row(&batch->after, i), new_x, size);
        batch->finite[i] = is_finite(new_x, task->parameters);
    }
}

/* Count an upload in a server's sum: total += weight (after - before), or weight * after if there was none before. */
void fedbcd_absorb(double *total, double weight, const float *after, const float *before, int64_t n) {
    if (before)
        for (int64_t j = 0; j < n; j++) total[j] += weight * ((double)after[j] - (double)before[j]);
    else
        for (int64_t j = 0; j < n; j++) total[j] += weight * (double)after[j];
}

/* -------------------------------------------------------------------------------------------------------------------------- testing */

/* The outputs of one model, a row for each sample. Inputs are blocks of `samples` each, by features: of these the chosen ones, in order. */
void fedbcd_outputs(const Task *task, const float *parameters, const float *blocks, const int64_t *chosen, int64_t count, float *outputs,
                    float *scratch) {
    const int64_t samples = task->samples, classes = task->layers[task->depth - 1].outputs;
    float *const pieces[2] = {scratch, scratch + by_features(task, widest(task))};
    for (int64_t b = 0; b < count; b++) {
        const float *now = blocks + chosen[b] * by_features(task, task->layers[0].inputs);
        for (int64_t l = 0; l < task->depth; l++) {
            forward(task->layers + l, parameters, now, samples, pieces[l % 2]);
            now = pieces[l % 2];
        }
        transpose(now, padded(samples), classes, samples, outputs + b * samples * classes, classes);
    }
}
