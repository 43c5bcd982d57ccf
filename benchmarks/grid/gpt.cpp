// Loss and gradients of the byte GPT of `diloco_bytes` (`ftopt.config.models.Transformer`), one window at a time, so
// that a window's activations stay in the cache. What torch computes, up to rounding: `tests/benchmarks/test_grid.py`.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

constexpr int LAYERS = 2, HEADS = 4, WIDTH = 64, TIME = 64, VOCAB = 256, HEAD = WIDTH / HEADS, HIDDEN = 4 * WIDTH;
constexpr int QKV = 3 * WIDTH, PAD = 16;  // rows of a power of two would fall into the same few sets of the cache
constexpr int LONG = HIDDEN + PAD, MIDDLE = QKV + PAD, SHORT = WIDTH + PAD;
static_assert(VOCAB == HIDDEN && TIME == WIDTH);

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int LANES = 16;

inline V load(const float *p) { return *reinterpret_cast<const V *>(p); }
inline void store(float *p, V v) { *reinterpret_cast<V *>(p) = v; }
inline V all(float x) { return V{} + x; }
inline float sum(V v) {
    float total = 0;
    for (int k = 0; k < LANES; ++k) total += v[k];
    return total;
}
inline float most(V v) {
    float found = v[0];
    for (int k = 1; k < LANES; ++k) found = v[k] > found ? v[k] : found;
    return found;
}

inline V exp_of(V x) {  // Cephes' expf
    x = x < all(-87.0f) ? all(-87.0f) : x;
    x = x > all(88.0f) ? all(88.0f) : x;
    const V round = all(12582912.0f);  // 1.5 * 2^23
    V n = x * all(1.44269504f) + round;
    const I power = reinterpret_cast<I &>(n) << 23;
    n -= round;
    x = x - n * all(0.693359375f) - n * all(-2.12194440e-4f);
    V y = all(1.9875691500e-4f);
    y = y * x + all(1.3981999507e-3f);
    y = y * x + all(8.3334519073e-3f);
    y = y * x + all(4.1665795894e-2f);
    y = y * x + all(1.6666665459e-1f);
    y = y * x + all(5.0000001201e-1f);
    y = y * x * x + x + all(1.0f);
    I bits = reinterpret_cast<I &>(y) + power;
    return reinterpret_cast<V &>(bits);
}

// C (+)= A B, a tile of R rows and N vectors. A[r, k] is a[r * down + k * along].
template <int R, int N>
inline void tile(const float *a, long down, long along, const float *b, long row, float *c, long out, int depth,
                 bool add) {
    V s[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) s[r][n] = add ? load(c + r * out + n * LANES) : V{};
    for (int k = 0; k < depth; ++k) {
        V v[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) v[n] = load(b + k * row + n * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const V x = all(a[r * down + k * along]);
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) s[r][n] += x * v[n];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) store(c + r * out + n * LANES, s[r][n]);
}

// C (+)= A B; `strip` lies between two blocks of 32 columns of B.
void multiply(int rows, int columns, int depth, const float *a, long down, long along, const float *b, long row,
              long strip, float *c, long out, bool add) {
    int j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES, b += strip)
        for (int i = 0; i < rows; i += 8)
            tile<8, 2>(a + i * down, down, along, b, row, c + i * out + j, out, depth, add);
    if (j < columns)
        for (int i = 0; i < rows; i += 16)
            tile<16, 1>(a + i * down, down, along, b, row, c + i * out + j, out, depth, add);
}

// Y = X W, W packed.
void through(int depth, int columns, const float *x, long in, const float *packed, float *y, long out,
             bool add = false) {
    multiply(TIME, columns, depth, x, in, 1, packed, 2 * LANES, 2L * LANES * depth, y, out, add);
}

// G += X' Y, the gradient of a matrix.
void outer(int rows, int columns, const float *x, long in, const float *y, long row, float *g) {
    multiply(rows, columns, TIME, x, 1, in, y, row, 2 * LANES, g, columns, true);
}

struct Matrix {  // (rows, columns), applied as x W'
    float forward[HIDDEN * WIDTH], backward[HIDDEN * WIDTH];
    void pack(const float *w, int rows, int columns) {
        for (int n = 0; n < rows; ++n)
            for (int k = 0; k < columns; ++k) {
                const float x = w[n * columns + k];
                forward[(n / 32) * 32 * columns + k * 32 + n % 32] = x;
                backward[(k / 32) * 32 * rows + n * 32 + k % 32] = x;
            }
    }
};

struct Norm {
    float hat[TIME * SHORT], y[TIME * SHORT], scale[TIME];
    void forward(const float *x, const float *w) {
        for (int t = 0; t < TIME; ++t) {
            const float *row = x + t * SHORT;
            V total{}, squares{};
            for (int k = 0; k < WIDTH; k += LANES) total += load(row + k);
            const V mean = all(sum(total) / WIDTH);
            for (int k = 0; k < WIDTH; k += LANES) {
                const V d = load(row + k) - mean;
                squares += d * d;
            }
            scale[t] = 1.0f / std::sqrt(sum(squares) / WIDTH + 1e-5f);
            for (int k = 0; k < WIDTH; k += LANES) {
                const V h = (load(row + k) - mean) * all(scale[t]);
                store(hat + t * SHORT + k, h);
                store(y + t * SHORT + k, h * load(w + k));
            }
        }
    }
    void backward(const float *g, const float *w, float *gw, float *dx, bool add) const {
        for (int t = 0; t < TIME; ++t) {
            V one{}, two{};
            for (int k = 0; k < WIDTH; k += LANES) {
                const V h = load(hat + t * SHORT + k), d = load(g + t * SHORT + k);
                store(gw + k, load(gw + k) + d * h);
                const V e = d * load(w + k);
                one += e;
                two += e * h;
            }
            const V mean = all(sum(one) / WIDTH), slope = all(sum(two) / WIDTH);
            for (int k = 0; k < WIDTH; k += LANES) {
                float *to = dx + t * SHORT + k;
                const V e = load(g + t * SHORT + k) * load(w + k);
                const V d = all(scale[t]) * (e - mean - load(hat + t * SHORT + k) * slope);
                store(to, add ? load(to) + d : d);
            }
        }
    }
};

void transposed(const float *x, long row, float *to) {  // (TIME, HEAD) to (HEAD, TIME)
    for (int t = 0; t < TIME; ++t)
        for (int k = 0; k < HEAD; ++k) to[k * SHORT + t] = x[t * row + k];
}

void turn(float *x, const float *cos, const float *sin, float way) {  // queries and keys of all heads
    constexpr int HALF = HEAD / 2;
    for (int t = 0; t < TIME; ++t)
        for (int part = 0; part < 2 * HEADS; ++part) {
            float *p = x + t * MIDDLE + part * HEAD;
            for (int k = 0; k < HALF; ++k) {
                const float c = cos[t * HALF + k], s = way * sin[t * HALF + k], a = p[k], b = p[k + HALF];
                p[k] = a * c - b * s;
                p[k + HALF] = a * s + b * c;
            }
        }
}

struct Layer {
    Matrix in, out, up, down;
    Norm before, between;
    float qkv[TIME * MIDDLE], weights[HEADS][TIME * SHORT], mixed[TIME * SHORT], slope[TIME * LONG], wide[TIME * LONG];

    void attend() {
        const float root = 1.0f / std::sqrt(float(HEAD));
        for (int h = 0; h < HEADS; ++h) {
            const float *q = qkv + h * HEAD, *k = q + WIDTH, *v = k + WIDTH;
            float keys[HEAD * SHORT];
            transposed(k, MIDDLE, keys);
            float *p = weights[h];
            for (int t = 0; t < TIME; t += LANES) {
                const int seen = t + LANES;
                multiply(LANES, seen, HEAD, q + t * MIDDLE, MIDDLE, 1, keys, SHORT, 32, p + t * SHORT, SHORT, false);
                for (int i = t; i < seen; ++i) {
                    float *row = p + i * SHORT;
                    for (int j = i + 1; j < seen; ++j) row[j] = -1e30f;
                    V top = load(row);
                    for (int j = LANES; j < seen; j += LANES) {
                        const V x = load(row + j);
                        top = x > top ? x : top;
                    }
                    const V peak = all(most(top));
                    V total{};
                    for (int j = 0; j < seen; j += LANES) {
                        const V x = load(row + j);
                        const V e = x < all(-1e29f) ? V{} : exp_of((x - peak) * all(root));
                        store(row + j, e);
                        total += e;
                    }
                    const V part = all(1.0f / sum(total));
                    for (int j = 0; j < seen; j += LANES) store(row + j, load(row + j) * part);
                }
                multiply(LANES, HEAD, seen, p + t * SHORT, SHORT, 1, v, MIDDLE, 32, mixed + t * SHORT + h * HEAD, SHORT,
                         false);
            }
        }
    }

    void attend_backward(const float *g, float *dqkv) const {
        const float root = 1.0f / std::sqrt(float(HEAD));
        for (int h = 0; h < HEADS; ++h) {
            const float *q = qkv + h * HEAD, *k = q + WIDTH, *v = k + WIDTH, *p = weights[h], *d = g + h * HEAD;
            float *dq = dqkv + h * HEAD, *dk = dq + WIDTH, *dv = dk + WIDTH;
            float values[HEAD * SHORT], ds[TIME * SHORT];
            transposed(v, MIDDLE, values);
            for (int t = 0; t < TIME; t += LANES) {
                const int seen = t + LANES;
                multiply(LANES, seen, HEAD, d + t * SHORT, SHORT, 1, values, SHORT, 32, ds + t * SHORT, SHORT, false);
                for (int i = t; i < seen; ++i) {
                    const V mean = all(sum(load(d + i * SHORT) * load(mixed + i * SHORT + h * HEAD)));
                    for (int j = 0; j < seen; j += LANES) {
                        const V x = load(p + i * SHORT + j) * (load(ds + i * SHORT + j) - mean) * all(root);
                        store(ds + i * SHORT + j, x);
                    }
                }
                multiply(LANES, HEAD, seen, ds + t * SHORT, SHORT, 1, k, MIDDLE, 32, dq + t * MIDDLE, MIDDLE, false);
            }
            for (int t = 0; t < TIME; t += LANES) {  // rows that see it: from t on
                const int first = t * SHORT + t, from = TIME - t;
                multiply(LANES, HEAD, from, ds + first, 1, SHORT, q + t * MIDDLE, MIDDLE, 32, dk + t * MIDDLE, MIDDLE,
                         false);
                multiply(LANES, HEAD, from, p + first, 1, SHORT, d + t * SHORT, SHORT, 32, dv + t * MIDDLE, MIDDLE,
                         false);
            }
        }
    }

    void gelu() {  // of `wide`, in place; its derivative into `slope`
        for (int t = 0; t < TIME; ++t)
            for (int k = 0; k < HIDDEN; k += LANES) {
                const V x = load(wide + t * LONG + k), c = all(0.7978845608f), d = all(0.044715f);
                const V two_u = all(2.0f) * c * (x + d * x * x * x);
                const V tanh = all(1.0f) - all(2.0f) / (exp_of(two_u) + all(1.0f));
                const V half = all(0.5f) * (all(1.0f) + tanh);
                store(wide + t * LONG + k, x * half);
                const V inner = c * (all(1.0f) + all(3.0f) * d * x * x);
                store(slope + t * LONG + k, half + all(0.5f) * x * (all(1.0f) - tanh * tanh) * inner);
            }
    }
};

struct Model {
    Layer layers[LAYERS];
    Norm last;
    Matrix head;
    float x[TIME * SHORT], dx[TIME * SHORT], narrow[TIME * SHORT], wide[TIME * LONG], dqkv[TIME * MIDDLE];
};

}  // namespace

// Parameters in the order of `named_parameters()`: the embedding; of each layer the norm before attention, the matrices
// in and out, the norm before the network, the matrices up and down; the last norm; the head. Gradients likewise; they
// are set. Returns the mean loss.
extern "C" float gradients(int windows, const int64_t *tokens, const int64_t *targets, const float *const *w,
                           float *const *g, const float *cos, const float *sin) {
    static thread_local std::unique_ptr<Model> kept(new Model);
    Model &m = *kept;
    constexpr int EACH = 6, LAST = 1 + LAYERS * EACH;
    const auto zero = [&](int which, int size) { std::memset(g[which], 0, sizeof(float) * size); };
    zero(0, VOCAB * WIDTH), zero(LAST, WIDTH), zero(LAST + 1, VOCAB * WIDTH);
    m.head.pack(w[LAST + 1], VOCAB, WIDTH);
    for (int l = 0; l < LAYERS; ++l) {
        const int p = 1 + l * EACH;
        zero(p, WIDTH), zero(p + 1, QKV * WIDTH), zero(p + 2, WIDTH * WIDTH), zero(p + 3, WIDTH);
        zero(p + 4, HIDDEN * WIDTH), zero(p + 5, HIDDEN * WIDTH);
        m.layers[l].in.pack(w[p + 1], QKV, WIDTH), m.layers[l].out.pack(w[p + 2], WIDTH, WIDTH);
        m.layers[l].up.pack(w[p + 4], HIDDEN, WIDTH), m.layers[l].down.pack(w[p + 5], WIDTH, HIDDEN);
    }
    double loss = 0;
    const float share = 1.0f / (float(windows) * TIME);
    for (int b = 0; b < windows; ++b, tokens += TIME, targets += TIME) {
        for (int t = 0; t < TIME; ++t)
            std::memcpy(m.x + t * SHORT, w[0] + tokens[t] * WIDTH, sizeof(float) * WIDTH);
        for (int l = 0; l < LAYERS; ++l) {
            Layer &layer = m.layers[l];
            layer.before.forward(m.x, w[1 + l * EACH]);
            through(WIDTH, QKV, layer.before.y, SHORT, layer.in.forward, layer.qkv, MIDDLE);
            turn(layer.qkv, cos, sin, 1);
            layer.attend();
            through(WIDTH, WIDTH, layer.mixed, SHORT, layer.out.forward, m.x, SHORT, true);
            layer.between.forward(m.x, w[4 + l * EACH]);
            through(WIDTH, HIDDEN, layer.between.y, SHORT, layer.up.forward, layer.wide, LONG);
            layer.gelu();
            through(HIDDEN, WIDTH, layer.wide, LONG, layer.down.forward, m.x, SHORT, true);
        }
        m.last.forward(m.x, w[LAST]);
        through(WIDTH, VOCAB, m.last.y, SHORT, m.head.forward, m.wide, LONG);
        for (int t = 0; t < TIME; ++t) {
            float *row = m.wide + t * LONG;
            const float wanted = row[targets[t]];
            V top = load(row), total{};
            for (int k = LANES; k < VOCAB; k += LANES) {
                const V x = load(row + k);
                top = x > top ? x : top;
            }
            const float peak = most(top);
            for (int k = 0; k < VOCAB; k += LANES) {
                const V e = exp_of(load(row + k) - all(peak));
                store(row + k, e);
                total += e;
            }
            const float mass = sum(total);
            loss += std::log(mass) + peak - wanted;
            for (int k = 0; k < VOCAB; k += LANES) store(row + k, load(row + k) * all(share / mass));
            row[targets[t]] -= share;
        }
        outer(VOCAB, WIDTH, m.wide, LONG, m.last.y, SHORT, g[LAST + 1]);
        through(VOCAB, WIDTH, m.wide, LONG, m.head.backward, m.narrow, SHORT);
        m.last.backward(m.narrow, w[LAST], g[LAST], m.dx, false);
        for (int l = LAYERS - 1; l >= 0; --l) {
            Layer &layer = m.layers[l];
            float *const *at = g + 1 + l * EACH;
            outer(WIDTH, HIDDEN, m.dx, SHORT, layer.wide, LONG, at[5]);
            through(WIDTH, HIDDEN, m.dx, SHORT, layer.down.backward, m.wide, LONG);
            for (int t = 0; t < TIME; ++t)
                for (int k = t * LONG; k < t * LONG + HIDDEN; k += LANES)
                    store(m.wide + k, load(m.wide + k) * load(layer.slope + k));
            outer(HIDDEN, WIDTH, m.wide, LONG, layer.between.y, SHORT, at[4]);
            through(HIDDEN, WIDTH, m.wide, LONG, layer.up.backward, m.narrow, SHORT);
            layer.between.backward(m.narrow, w[4 + l * EACH], at[3], m.dx, true);
            outer(WIDTH, WIDTH, m.dx, SHORT, layer.mixed, SHORT, at[2]);
            through(WIDTH, WIDTH, m.dx, SHORT, layer.out.backward, m.narrow, SHORT);
            layer.attend_backward(m.narrow, m.dqkv);
            turn(m.dqkv, cos, sin, -1);
            outer(QKV, WIDTH, m.dqkv, MIDDLE, layer.before.y, SHORT, at[1]);
            through(QKV, WIDTH, m.dqkv, MIDDLE, layer.in.backward, m.narrow, SHORT);
            layer.before.backward(m.narrow, w[1 + l * EACH], at[0], m.dx, true);
        }
        for (int t = 0; t < TIME; ++t)
            for (int k = 0; k < WIDTH; k += LANES) {
                float *to = g[0] + tokens[t] * WIDTH + k;
                store(to, load(to) + load(m.dx + t * SHORT + k));
            }
    }
    return float(loss * share);
}
