// Package asker asks the nodes of a cluster for decisions, over each protocol that callers have, for package load and bench.
//
// It returns the nodes' answers: it remembers no refusals and admits nothing by itself. A check that shadow mode admits beyond
// its limit counts as refused.
package asker

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

	"github.com/gomodule/redigo/redis"
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/load"
	"github.com/weirlimit/weir/internal/remote"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// Config names the nodes, the protocol and the limit to ask for.
type Config struct {
	Over        string   // grpc (a call each), stream (the Go client), http or resp
	Addrs       []string // of nodes, used in turn; none: loopback, with the usual port
	Connections int      // to each address, over grpc; at least 1
	Concurrency int      // checks in flight at most
	Timeout     time.Duration
	TLS         remote.Identity
	Target      *weirv1.Target // without a key
	Inline      *algo.Limit    // of Target, if it has one
	Cost        int64
}

// Open connects to the nodes. closeAll closes all askers.
func Open(c Config) (askers []load.Asker, closeAll func(), err error) {
	usual := map[string]string{"grpc": "8081", "stream": "8081", "http": "8080", "resp": "6380"}
	port, ok := usual[c.Over]
	switch {
	case !ok:
		return nil, nil, fmt.Errorf("over: %q is not one of grpc, stream, http and resp", c.Over)
	case c.Over == "resp" && c.Inline != nil:
		return nil, nil, errors.New("over: resp takes a policy, and no limit along")
	}
	addrs := c.Addrs
	if len(addrs) == 0 {
		addrs = []string{"127.0.0.1:" + port}
	}
	for _, addr := range addrs {
		if host, port, err := net.SplitHostPort(addr); err != nil || host == "" || port == "" {
			return nil, nil, fmt.Errorf("addr: %q is not HOST:PORT", addr)
		}
	}
	if c.Connections < 1 || c.Connections > load.MaxConcurrency {
		return nil, nil, fmt.Errorf("connections: must be 1 to %d", load.MaxConcurrency)
	}
	config, err := c.TLS.Config()
	if err != nil {
		return nil, nil, err
	}
	var token string
	for _, addr := range addrs {
		if token, err = c.TLS.Token(addr); err != nil {
			return nil, nil, err
		}
	}
	var closers []io.Closer
	closeAll = func() {
		for _, c := range closers {
			_ = c.Close() // the run is over
		}
	}
	switch c.Over {
	case "grpc":
		creds, err := c.TLS.Transport()
		if err != nil {
			return nil, nil, err
		}
		for range c.Connections {
			for _, addr := range addrs {
				conn, err := grpc.NewClient("dns:///"+addr, grpc.WithTransportCredentials(creds), grpc.WithNoProxy())
				if err != nil {
					closeAll()
					return nil, nil, fmt.Errorf("addr: %w", err)
				}
				closers = append(closers, conn)
				askers = append(askers, &grpcAsker{c.Target, c.Cost, token, weirv1.NewLimiterClient(conn)})
			}
		}
	case "stream":
		a, conn, err := c.streamed(addrs, config, token)
		if err != nil {
			return nil, nil, err
		}
		closers, askers = append(closers, conn), append(askers, a)
	case "http":
		transport := &http.Transport{TLSClientConfig: config, MaxIdleConnsPerHost: c.Concurrency, MaxConnsPerHost: c.Concurrency}
		closers = append(closers, idleConnections{transport})
		for _, addr := range addrs {
			askers = append(askers, newHTTPAsker(&c, addr, token, transport))
		}
	case "resp":
		for _, addr := range addrs {
			opts := []redis.DialOption{redis.DialConnectTimeout(c.Timeout), redis.DialReadTimeout(c.Timeout), redis.DialWriteTimeout(c.Timeout)}
			if token != "" {
				opts = append(opts, redis.DialPassword(token))
			}
			if config != nil {
				opts = append(opts, redis.DialUseTLS(true), redis.DialTLSConfig(config))
			}
			pool := &redis.Pool{MaxIdle: c.Concurrency, DialContext: func(ctx context.Context) (redis.Conn, error) {
				return redis.DialContext(ctx, "tcp", addr, opts...)
			}}
			closers, askers = append(closers, pool), append(askers, &respAsker{pool, c.Target.Policy, c.Cost})
		}
	}
	return askers, closeAll, nil
}

// grpcAsker makes a call for each check.
type grpcAsker struct {
	target  *weirv1.Target // without a key
	cost    int64
	token   string // empty: none
	service weirv1.LimiterClient
}

// Ask implements load.Asker.
func (a *grpcAsker) Ask(ctx context.Context, key string) (load.Answer, error) {
	target := &weirv1.Target{Policy: a.target.Policy, Limit: a.target.Limit, Namespace: a.target.Namespace, Key: key}
	if a.token != "" { // Config.TLS has looked whether it may travel
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+a.token)
	}
	r, err := a.service.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: target, Cost: &a.cost}}})
	switch {
	case err != nil:
		return load.Answer{}, err
	case len(r.GetResults()) != 1:
		return load.Answer{}, fmt.Errorf("one check got %d results", len(r.GetResults()))
	case r.Results[0].GetDecision() == nil:
		return load.Answer{}, errors.New(r.Results[0].GetError().GetMessage())
	}
	d := r.Results[0].GetDecision()
	return load.Answer{
		Allowed: d.Allowed && !d.Shadow, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed, Limit: d.Limit, Window: time.Duration(d.WindowNs),
	}, nil
}

// streamAsker asks by way of the Go client.
type streamAsker struct {
	limiter *client.Limiter
	cost    int64
}

func (c *Config) streamed(addrs []string, config *tls.Config, token string) (load.Asker, io.Closer, error) {
	// Each check is to travel, and one that nobody answers is not to count as admitted.
	opts := []client.Option{client.WithoutMemory(), client.WithoutLoans(), client.WithOnError(client.FailClosed), client.WithTimeout(c.Timeout)}
	if config != nil {
		opts = append(opts, client.WithTLS(config))
	}
	if token != "" {
		opts = append(opts, client.WithToken(token))
	}
	conn, err := client.Dial(context.Background(), strings.Join(addrs, ","), opts...)
	if err != nil {
		return nil, nil, err
	}
	a := &streamAsker{cost: c.Cost}
	if c.Inline != nil {
		a.limiter = conn.Inline(c.Target.Namespace, *c.Inline)
	} else {
		a.limiter = conn.Policy(c.Target.Policy)
	}
	return a, conn, nil
}

// Ask implements load.Asker.
func (a *streamAsker) Ask(ctx context.Context, key string) (load.Answer, error) {
	d, err := a.limiter.AllowN(ctx, key, a.cost)
	if err == nil && d.FailedClosed && d.Limit == 0 {
		err = errors.New("no node answered") // but the client, for them
	}
	return load.Answer{
		Allowed: d.Allowed && !d.Shadow, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed, Limit: d.Limit, Window: d.Window,
	}, err
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

func newHTTPAsker(c *Config, addr, token string, transport *http.Transport) *httpAsker {
	a := &httpAsker{check: httpCheck{Policy: c.Target.Policy, Namespace: c.Target.Namespace, Cost: c.Cost}, token: token, client: &http.Client{Transport: transport}}
	if c.Inline != nil {
		a.check.Limit = &httpLimit{Algorithm: c.Inline.Algorithm.String(), Limit: c.Inline.Limit, Window: c.Inline.Window.String()}
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
		Shadow       bool   `json:"shadow"`
		Detail       string `json:"detail"`
	}
	if err := json.Unmarshal(text, &d); err != nil || d.Allowed == nil {
		return load.Answer{}, fmt.Errorf("%s: %s", resp.Status, d.Detail)
	}
	return load.Answer{Allowed: *d.Allowed && !d.Shadow, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed}, nil
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
	return load.Answer{Allowed: allowed == 1 && d["shadow"] == 0, FailedOpen: d["failed_open"] == 1}, nil
}

// idleConnections closes those of a transport.
type idleConnections struct{ transport *http.Transport }

// Close implements io.Closer.
func (c idleConnections) Close() error {
	c.transport.CloseIdleConnections()
	return nil
}
