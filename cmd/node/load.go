package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/gomodule/redigo/redis"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/load"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// loadFlags are those of weir load.
type loadFlags struct {
	targetFlags
	tls          clientTLS
	addrs        []string
	over, output string
	atMost       string
	connections  int
	run          load.Config
	distribution string
}

// defaultLoadCount bounds the checks of a run that says nothing.
const defaultLoadCount = 10_000_000

func newLoad() *cobra.Command {
	var f loadFlags
	cmd := &cobra.Command{
		Use:   "load",
		Short: "Send checks to a cluster, measure the answers and check them",
		Long: `Send checks to a running cluster for a while: at a rate (open loop: latencies count from the moment each check
was due), or, without --rate, each worker's next one when the last is answered (closed loop). What was admitted is held to
the limit: of a key, at most so many units in any window, as far as can be told for certain from when checks were sent and
their answers came. The checks are charged: use keys or a namespace of their own (--key-prefix, --namespace).
Exit status: 0 done, 1 more was admitted than the limit lets through, 2 error, also when a check got no decision.`,
		Example: `  weir load --limit 100/1m --keys 50 --rate 1000 --for 30s
  weir load --policy login --at-most 5/1m --over http --concurrency 64
  weir load --limit 1000000/1m --over stream --concurrency 256 --distribution zipf -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.do(cmd.Context(), cmd.Flags(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	fs := cmd.Flags()
	f.targetFlags.register(fs)
	fs.StringVar(&f.over, "over", "grpc", "how checks travel: grpc (a call each), stream (the Go client, which merges them and knows the owners), http or resp (the Redis protocol, with --policy)")
	fs.StringSliceVar(&f.addrs, "addr", nil, "addresses of nodes, HOST:PORT of the port for --over, used in turn, separated by commas (default 127.0.0.1 with port 8081, over http 8080, over resp 6380)")
	fs.Float64Var(&f.run.Rate, "rate", 0, "checks a second; 0: as many as the workers get answered")
	fs.IntVar(&f.run.Concurrency, "concurrency", 64, "workers, and so checks under way at most")
	fs.IntVar(&f.connections, "connections", 1, "connections to each address, over grpc")
	fs.DurationVar(&f.run.Duration, "for", 10*time.Second, "how long to send")
	fs.Int64Var(&f.run.Count, "count", defaultLoadCount, "checks to send at most")
	fs.DurationVar(&f.run.Timeout, "timeout", 2*time.Second, "longest time to wait for an answer")
	fs.Int64Var(&f.run.Cost, "cost", 1, "units of each check")
	fs.IntVar(&f.run.Keys.Count, "keys", 1000, "number of different keys")
	fs.StringVar(&f.distribution, "distribution", string(load.Uniform), "how often which key is asked for: uniform, zipf, or hot (one gets nine of ten checks)")
	fs.Float64Var(&f.run.Keys.Skew, "skew", 1.1, "exponent of zipf, above 1")
	fs.StringVar(&f.run.Keys.Prefix, "key-prefix", "load-", "what keys begin with")
	fs.Uint64Var(&f.run.Keys.Seed, "seed", 1, "the same seed asks for the same keys in the same order")
	fs.StringVar(&f.atMost, "at-most", "", "what the answers are held to: units of a key in any window, as 5/1m (default: what --limit and --algorithm let through; with --policy: not checked)")
	f.tls.register(fs)
	fs.StringVarP(&f.output, "output", "o", "text", "how to print the result: text or json")
	return cmd
}

func (f *loadFlags) do(ctx context.Context, fs *pflag.FlagSet, stdout, stderr io.Writer) error {
	if f.output != "text" && f.output != "json" {
		return fmt.Errorf("--output: %q is not one of text and json", f.output)
	}
	inline, err := f.inline(fs)
	if err != nil {
		return err
	}
	cfg := f.run
	cfg.Keys.Distribution = load.Distribution(f.distribution)
	if cfg.Bound, err = f.bound(inline); err != nil {
		return err
	}
	askers, closeAll, err := f.askers(inline)
	if err != nil {
		return err
	}
	defer closeAll()
	cfg.Askers = askers
	line := newTerminalLine(stderr)
	cfg.Progress = func(p load.Progress) {
		line.show("[%s] %v of %v  %s checks  p99 %v", bar(int64(p.Elapsed), int64(p.Of)), p.Elapsed.Round(time.Second), p.Of, humanize.Comma(p.Sent), short(p.P99))
	}
	result, err := load.Run(ctx, cfg)
	line.clear()
	if err != nil {
		return fmt.Errorf("--%w", flagged(err))
	}
	if err := f.print(stdout, &result); err != nil {
		return err
	}
	switch {
	case result.Verdict != nil && !result.Verdict.Holds:
		return errNegative
	case result.Errors > 0:
		return fmt.Errorf("%d of %d checks got no decision; the first: %s", result.Errors, result.Checks, result.FirstError)
	}
	return nil
}

// flagged calls the settings of package load by the names of their flags.
func flagged(err error) error {
	if rest, ok := strings.CutPrefix(err.Error(), "duration: "); ok {
		return errors.New("for: " + rest)
	}
	return err
}

// bound is what the answers are held to: what was said, or what the limit sent along lets through in its window at most.
func (f *loadFlags) bound(inline *algo.Limit) (*load.Bound, error) {
	if f.atMost != "" {
		n, window, err := policy.ParseRate(f.atMost)
		if err != nil {
			return nil, fmt.Errorf("--at-most: %w", err)
		}
		return &load.Bound{Units: n, Window: window}, nil
	}
	if inline == nil {
		return nil, nil
	}
	b := &load.Bound{Units: inline.Limit, Window: inline.Window}
	switch inline.Algorithm {
	case algo.Concurrency:
		return nil, errors.New("--algorithm: concurrency takes leases, not checks")
	case algo.SlidingLog, algo.SlidingWindow:
	default: // across a boundary, or a full bucket and what comes back meanwhile
		b.Units *= 2
	}
	return b, nil
}

// askers connect to the nodes.
func (f *loadFlags) askers(inline *algo.Limit) (askers []load.Asker, closeAll func(), err error) {
	usual := map[string]string{"grpc": "8081", "stream": "8081", "http": "8080", "resp": "6380"}
	port, ok := usual[f.over]
	switch {
	case !ok:
		return nil, nil, fmt.Errorf("--over: %q is not one of grpc, stream, http and resp", f.over)
	case f.over == "resp" && inline != nil:
		return nil, nil, errors.New("--over: resp takes a --policy, and no limit along")
	}
	addrs := f.addrs
	if len(addrs) == 0 {
		addrs = []string{"127.0.0.1:" + port}
	}
	for _, addr := range addrs {
		if host, port, err := net.SplitHostPort(addr); err != nil || host == "" || port == "" {
			return nil, nil, fmt.Errorf("--addr: %q is not HOST:PORT", addr)
		}
	}
	if f.connections < 1 || f.connections > load.MaxConcurrency {
		return nil, nil, fmt.Errorf("--connections: must be 1 to %d", load.MaxConcurrency)
	}
	config, err := f.tls.config()
	if err != nil {
		return nil, nil, err
	}
	var token string
	for _, addr := range addrs {
		if token, err = f.tls.token(addr); err != nil {
			return nil, nil, err
		}
	}
	var closers []io.Closer
	closeAll = func() {
		for _, c := range closers {
			_ = c.Close() // the run is over
		}
	}
	switch f.over {
	case "grpc":
		creds, err := f.tls.transport()
		if err != nil {
			return nil, nil, err
		}
		for range f.connections {
			for _, addr := range addrs {
				conn, err := grpc.NewClient("dns:///"+addr, grpc.WithTransportCredentials(creds), grpc.WithNoProxy(), grpc.WithPerRPCCredentials(bearer(token)))
				if err != nil {
					closeAll()
					return nil, nil, fmt.Errorf("--addr: %w", err)
				}
				closers = append(closers, conn)
				askers = append(askers, &grpcAsker{f, inline, weirv1.NewLimiterClient(conn)})
			}
		}
	case "stream":
		a, c, err := f.streamed(addrs, inline, config, token)
		if err != nil {
			return nil, nil, err
		}
		closers, askers = append(closers, c), append(askers, a)
	case "http":
		transport := &http.Transport{TLSClientConfig: config, MaxIdleConnsPerHost: f.run.Concurrency, MaxConnsPerHost: f.run.Concurrency}
		closers = append(closers, idleConnections{transport})
		for _, addr := range addrs {
			askers = append(askers, newHTTPAsker(f, inline, addr, token, transport))
		}
	case "resp":
		for _, addr := range addrs {
			opts := []redis.DialOption{redis.DialConnectTimeout(f.run.Timeout), redis.DialReadTimeout(f.run.Timeout), redis.DialWriteTimeout(f.run.Timeout)}
			if token != "" {
				opts = append(opts, redis.DialPassword(token))
			}
			if config != nil {
				opts = append(opts, redis.DialUseTLS(true), redis.DialTLSConfig(config))
			}
			c := &redis.Pool{MaxIdle: f.run.Concurrency, DialContext: func(ctx context.Context) (redis.Conn, error) {
				return redis.DialContext(ctx, "tcp", addr, opts...)
			}}
			closers, askers = append(closers, c), append(askers, &respAsker{c, f.policy, f.run.Cost})
		}
	}
	return askers, closeAll, nil
}

// bearer presents a token with each call over gRPC; empty: none. Whether it may travel in plain text was looked at before.
type bearer string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (bearer) RequireTransportSecurity() bool { return false }

var _ credentials.PerRPCCredentials = bearer("")

// grpcAsker makes a call for each check.
type grpcAsker struct {
	flags   *loadFlags
	inline  *algo.Limit
	service weirv1.LimiterClient
}

// Ask implements load.Asker.
func (a *grpcAsker) Ask(ctx context.Context, key string) (load.Answer, error) {
	cost := a.flags.run.Cost
	r, err := a.service.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: a.flags.message(a.inline, key), Cost: &cost}}})
	switch {
	case err != nil:
		return load.Answer{}, err
	case len(r.GetResults()) != 1:
		return load.Answer{}, fmt.Errorf("one check got %d results", len(r.GetResults()))
	case r.Results[0].GetDecision() == nil:
		return load.Answer{}, errors.New(r.Results[0].GetError().GetMessage())
	}
	d := r.Results[0].GetDecision()
	return load.Answer{Allowed: d.Allowed, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed}, nil
}

// streamAsker asks by way of the Go client.
type streamAsker struct {
	limiter *client.Limiter
	cost    int64
}

func (f *loadFlags) streamed(addrs []string, inline *algo.Limit, config *tls.Config, token string) (load.Asker, io.Closer, error) {
	// Each check is to travel, and one that nobody answers is not to count as admitted.
	opts := []client.Option{client.WithoutMemory(), client.WithoutLoans(), client.WithOnError(client.FailClosed), client.WithTimeout(f.run.Timeout)}
	if config != nil {
		opts = append(opts, client.WithTLS(config))
	}
	if token != "" {
		opts = append(opts, client.WithToken(token))
	}
	c, err := client.Dial(context.Background(), strings.Join(addrs, ","), opts...)
	if err != nil {
		return nil, nil, err
	}
	a := &streamAsker{cost: f.run.Cost}
	if inline != nil {
		a.limiter = c.Inline(f.namespace, *inline)
	} else {
		a.limiter = c.Policy(f.policy)
	}
	return a, c, nil
}

// Ask implements load.Asker.
func (a *streamAsker) Ask(ctx context.Context, key string) (load.Answer, error) {
	d, err := a.limiter.AllowN(ctx, key, a.cost)
	if err == nil && d.FailedClosed && d.Limit == 0 {
		err = errors.New("no node answered") // but the client, for them
	}
	return load.Answer{Allowed: d.Allowed, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed}, err
}

// httpCheck is a check as POST /v1/check has it.
type httpCheck struct {
	Policy    string     `json:"policy,omitempty"`
	Namespace string     `json:"namespace,omitempty"`
	Limit     *httpLimit `json:"limit,omitempty"`
	Key       string     `json:"key"`
	Cost      int64      `json:"cost"`
}

type httpLimit struct {
	Algorithm string `json:"algorithm"`
	Limit     int64  `json:"limit"`
	Window    string `json:"window"`
}

// httpAsker posts each check.
type httpAsker struct {
	check  httpCheck // without a key
	url    string
	token  string
	client *http.Client
}

func newHTTPAsker(f *loadFlags, inline *algo.Limit, addr, token string, transport *http.Transport) *httpAsker {
	a := &httpAsker{check: httpCheck{Policy: f.policy, Namespace: f.namespace, Cost: f.run.Cost}, token: token, client: &http.Client{Transport: transport}}
	if inline != nil {
		a.check.Limit = &httpLimit{Algorithm: inline.Algorithm.String(), Limit: inline.Limit, Window: inline.Window.String()}
	}
	a.url = "http://" + addr + "/v1/check"
	if transport.TLSClientConfig != nil {
		a.url = "https://" + addr + "/v1/check"
	}
	return a
}

// maxAnswer is the size in bytes of the largest answer to a check that is read.
const maxAnswer = 64 << 10

// Ask implements load.Asker.
func (a *httpAsker) Ask(ctx context.Context, key string) (load.Answer, error) {
	check := a.check
	check.Key = key
	body, err := json.Marshal(&check)
	if err != nil {
		return load.Answer{}, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, a.url, bytes.NewReader(body))
	if err != nil {
		return load.Answer{}, err
	}
	r.Header.Set("Content-Type", "application/json")
	if a.token != "" {
		r.Header.Set("Authorization", "Bearer "+a.token)
	}
	resp, err := a.client.Do(r)
	if err != nil {
		return load.Answer{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return load.Answer{}, err
	}
	var d struct {
		Allowed      *bool  `json:"allowed"`
		FailedOpen   bool   `json:"failed_open"`
		FailedClosed bool   `json:"failed_closed"`
		Detail       string `json:"detail"`
	}
	if err := json.Unmarshal(text, &d); err != nil || d.Allowed == nil {
		return load.Answer{}, fmt.Errorf("%s: %s", resp.Status, d.Detail)
	}
	return load.Answer{Allowed: *d.Allowed, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed}, nil
}

// respAsker sends WEIR.CHECK.
type respAsker struct {
	pool   *redis.Pool
	policy string
	cost   int64
}

// Ask implements load.Asker.
func (a *respAsker) Ask(ctx context.Context, key string) (load.Answer, error) {
	conn, err := a.pool.GetContext(ctx)
	if err != nil {
		return load.Answer{}, err
	}
	defer conn.Close() // back into the pool
	d, err := redis.Int64Map(redis.DoContext(conn, ctx, "WEIR.CHECK", a.policy, key, a.cost))
	if err != nil {
		return load.Answer{}, err
	}
	allowed, ok := d["allowed"]
	if !ok {
		return load.Answer{}, errors.New("the answer is not a decision")
	}
	return load.Answer{Allowed: allowed == 1, FailedOpen: d["failed_open"] == 1}, nil
}

// idleConnections closes those of a transport.
type idleConnections struct{ transport *http.Transport }

// Close implements io.Closer.
func (c idleConnections) Close() error {
	c.transport.CloseIdleConnections()
	return nil
}

func (f *loadFlags) print(w io.Writer, r *load.Result) error {
	if f.output == "json" {
		return json.NewEncoder(w).Encode(r)
	}
	loop := "closed loop"
	if f.run.Rate > 0 {
		loop = fmt.Sprintf("open loop at %s a second", humanize.Commaf(f.run.Rate))
	}
	fmt.Fprintf(w, "%s checks in %v over %s, %s, %d workers: %s decisions a second\n", humanize.Comma(r.Checks), r.Elapsed.Round(time.Millisecond), f.over, loop,
		f.run.Concurrency, humanize.CommafWithDigits(r.Rate, 1))
	fmt.Fprintf(w, "admitted %s (failed open %s)  refused %s (failed closed %s)  errors %s", humanize.Comma(r.Admitted), humanize.Comma(r.FailedOpen),
		humanize.Comma(r.Refused), humanize.Comma(r.FailedClosed), humanize.Comma(r.Errors))
	if f.run.Rate > 0 {
		fmt.Fprintf(w, "  unsent %s", humanize.Comma(r.Unsent))
	}
	l := r.Latency
	fmt.Fprintf(w, "\nlatency min %v  p50 %v  p90 %v  p99 %v  p99.9 %v  max %v  mean %v\n", short(l.Min), short(l.P50), short(l.P90), short(l.P99), short(l.P999), short(l.Max), short(l.Mean))
	if r.Unsent > 0 {
		fmt.Fprintf(w, "%s checks were due and never sent, and are not among the latencies: the cluster or this host cannot keep up, or give more --concurrency\n", humanize.Comma(r.Unsent))
	}
	var err error
	switch v := r.Verdict; {
	case v == nil:
		_, err = fmt.Fprintln(w, "not checked: --at-most says what the policy lets through")
	case v.Holds:
		_, err = fmt.Fprintf(w, "checked: no key was admitted more than %d units in any %v; the most was %d\n", v.Units, v.Window, v.Most)
	default:
		_, err = fmt.Fprintf(w, "FAILED: %q was admitted %d units within %v, more than %d\n", v.Key, v.Most, v.Window, v.Units)
	}
	return err
}

// short is a duration with three digits, about.
func short(d time.Duration) time.Duration {
	unit := time.Nanosecond
	for unit*1000 <= d {
		unit *= 10
	}
	return d.Round(unit)
}
