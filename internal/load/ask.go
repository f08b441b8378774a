package load

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
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

// Nodes has the nodes to ask, the protocol and the limit. Its Askers return the nodes' answers: they remember no
// refusals and borrow nothing. A check that shadow mode admits beyond its limit counts as refused.
type Nodes struct {
	Over        string   // grpc (a call each), stream (the Go client), http or resp
	Addrs       []string // of nodes, used in turn; none: loopback, with the default port
	Connections int      // to each address, over grpc; at least 1
	Concurrency int      // most checks in flight
	Timeout     time.Duration
	TLS         *tls.Config                       // nil: plain text
	Token       func(addr string) (string, error) // returns the token for an address, empty for none; nil: no token
	Target      *weirv1.Target                    // without a key
	Inline      *algo.Limit                       // the limit of Target, if it has one
	Cost        int64
}

// Open connects to the nodes. The caller must call closeAll at the end.
func (n Nodes) Open() (askers []Asker, closeAll func(), err error) {
	if err := n.validate(); err != nil {
		return nil, nil, err
	}
	var token string
	for _, addr := range n.Addrs {
		if n.Token == nil {
			break
		}
		if token, err = n.Token(addr); err != nil {
			return nil, nil, err
		}
	}
	var closers []func() error
	closeAll = func() {
		for _, c := range closers {
			_ = c() // an error does not matter after the run
		}
	}
	add := func(a Asker, c func() error) { askers, closers = append(askers, a), append(closers, c) }
	switch n.Over {
	case "grpc":
		err = n.openGRPC(token, add)
	case "stream":
		err = n.openStream(token, add)
	case "http":
		transport := &http.Transport{TLSClientConfig: n.TLS, MaxIdleConnsPerHost: n.Concurrency,
			MaxConnsPerHost: n.Concurrency}
		for _, addr := range n.Addrs {
			add(n.overHTTP(addr, token, transport), func() error { transport.CloseIdleConnections(); return nil })
		}
	case "resp":
		for _, addr := range n.Addrs {
			pool := n.respPool(addr, token)
			add(n.overRESP(pool), pool.Close)
		}
	}
	if err != nil {
		closeAll()
		return nil, nil, err
	}
	return askers, closeAll, nil
}

// validate returns an error that names the invalid setting, and sets the default address.
func (n *Nodes) validate() error {
	usual := map[string]string{"grpc": "8081", "stream": "8081", "http": "8080", "resp": "6380"}
	port, ok := usual[n.Over]
	switch {
	case !ok:
		return fmt.Errorf("over: %q is not one of grpc, stream, http and resp", n.Over)
	case n.Over == "resp" && n.Inline != nil:
		return errors.New("over: resp takes a policy, and no limit along")
	}
	if len(n.Addrs) == 0 {
		n.Addrs = []string{"127.0.0.1:" + port}
	}
	for _, addr := range n.Addrs {
		if host, port, err := net.SplitHostPort(addr); err != nil || host == "" || port == "" {
			return fmt.Errorf("addr: %q is not HOST:PORT", addr)
		}
	}
	return nil
}

func (n *Nodes) openGRPC(token string, add func(Asker, func() error)) error {
	creds := insecure.NewCredentials()
	if n.TLS != nil {
		creds = credentials.NewTLS(n.TLS)
	}
	for range n.Connections {
		for _, addr := range n.Addrs {
			conn, err := grpc.NewClient("dns:///"+addr, grpc.WithTransportCredentials(creds), grpc.WithNoProxy())
			if err != nil {
				return fmt.Errorf("addr: %w", err)
			}
			add(n.overGRPC(weirv1.NewLimiterClient(conn), token), conn.Close)
		}
	}
	return nil
}

// overGRPC makes a unary call for each check.
func (n *Nodes) overGRPC(service weirv1.LimiterClient, token string) Asker {
	about, cost := n.Target, n.Cost
	return func(ctx context.Context, key string) (Answer, error) {
		target := &weirv1.Target{Policy: about.Policy, Limit: about.Limit, Namespace: about.Namespace, Key: key}
		if token != "" { // Nodes.Token has decided that it may be sent
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		r, err := service.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: target, Cost: &cost}}})
		switch {
		case err != nil:
			return Answer{}, err
		case len(r.GetResults()) != 1:
			return Answer{}, fmt.Errorf("one check got %d results", len(r.GetResults()))
		case r.Results[0].GetDecision() == nil:
			return Answer{}, errors.New(r.Results[0].GetError().GetMessage())
		}
		d := r.Results[0].GetDecision()
		return Answer{
			Allowed: d.Allowed && !d.Shadow, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed, Limit: d.Limit,
			Window: time.Duration(d.WindowNs),
		}, nil
	}
}

// openStream asks through the Go client.
func (n *Nodes) openStream(token string, add func(Asker, func() error)) error {
	// Each check must go to a node, and a check that no node answers must not count as admitted.
	opts := []client.Option{client.WithoutMemory(), client.WithoutLoans(), client.WithOnError(client.FailClosed),
		client.WithTimeout(n.Timeout)}
	if n.TLS != nil {
		opts = append(opts, client.WithTLS(n.TLS))
	}
	if token != "" {
		opts = append(opts, client.WithToken(token))
	}
	conn, err := client.Dial(context.Background(), strings.Join(n.Addrs, ","), opts...)
	if err != nil {
		return err
	}
	limiter, cost := conn.Policy(n.Target.Policy), n.Cost
	if n.Inline != nil {
		limiter = conn.Inline(n.Target.Namespace, *n.Inline)
	}
	add(func(ctx context.Context, key string) (Answer, error) {
		d, err := limiter.AllowN(ctx, key, cost)
		if err == nil && d.FailedClosed && d.Limit == 0 {
			err = errors.New("no node answered") // this answer is the client's own
		}
		return Answer{
			Allowed: d.Allowed && !d.Shadow, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed, Limit: d.Limit,
			Window: d.Window,
		}, err
	}, conn.Close)
	return nil
}

// httpCheck is the body of POST /v1/check.
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

// overHTTP sends POST /v1/check.
func (n *Nodes) overHTTP(addr, token string, transport *http.Transport) Asker {
	about := httpCheck{Policy: n.Target.Policy, Namespace: n.Target.Namespace, Cost: n.Cost}
	if l := n.Inline; l != nil {
		about.Limit = &httpLimit{Algorithm: l.Algorithm.String(), Limit: l.Limit, Window: l.Window.String()}
	}
	url := "http://" + addr + "/v1/check"
	if transport.TLSClientConfig != nil {
		url = "https://" + addr + "/v1/check"
	}
	httpClient := &http.Client{Transport: transport}
	return func(ctx context.Context, key string) (Answer, error) {
		check := about
		check.Key = key
		return askHTTP(ctx, httpClient, url, token, &check)
	}
}

// maxAnswer bounds the bytes that are read of an answer.
const maxAnswer = 64 << 10

func askHTTP(ctx context.Context, httpClient *http.Client, url, token string, check *httpCheck) (Answer, error) {
	body, err := json.Marshal(check)
	if err != nil {
		return Answer{}, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	r.Header.Set("Content-Type", "application/json")
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := httpClient.Do(r)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return Answer{}, err
	}
	var d struct {
		Allowed      *bool  `json:"allowed"`
		FailedOpen   bool   `json:"failed_open"`
		FailedClosed bool   `json:"failed_closed"`
		Shadow       bool   `json:"shadow"`
		Detail       string `json:"detail"`
	}
	if err := json.Unmarshal(text, &d); err != nil || d.Allowed == nil {
		return Answer{}, fmt.Errorf("%s: %s", resp.Status, d.Detail)
	}
	return Answer{Allowed: *d.Allowed && !d.Shadow, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed}, nil
}

func (n *Nodes) respPool(addr, token string) *redis.Pool {
	opts := []redis.DialOption{redis.DialConnectTimeout(n.Timeout), redis.DialReadTimeout(n.Timeout),
		redis.DialWriteTimeout(n.Timeout)}
	if token != "" {
		opts = append(opts, redis.DialPassword(token))
	}
	if n.TLS != nil {
		opts = append(opts, redis.DialUseTLS(true), redis.DialTLSConfig(n.TLS))
	}
	return &redis.Pool{MaxIdle: n.Concurrency, DialContext: func(ctx context.Context) (redis.Conn, error) {
		return redis.DialContext(ctx, "tcp", addr, opts...)
	}}
}

// overRESP sends WEIR.CHECK.
func (n *Nodes) overRESP(pool *redis.Pool) Asker {
	policy, cost := n.Target.Policy, n.Cost
	return func(ctx context.Context, key string) (Answer, error) {
		conn, err := pool.GetContext(ctx)
		if err != nil {
			return Answer{}, err
		}
		defer conn.Close() // back into the pool
		d, err := redis.Int64Map(redis.DoContext(conn, ctx, "WEIR.CHECK", policy, key, cost))
		if err != nil {
			return Answer{}, err
		}
		allowed, ok := d["allowed"]
		if !ok {
			return Answer{}, errors.New("the answer is not a decision")
		}
		return Answer{Allowed: allowed == 1 && d["shadow"] == 0, FailedOpen: d["failed_open"] == 1}, nil
	}
}
