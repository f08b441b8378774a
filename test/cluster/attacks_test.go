package clustertest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// Attacks by callers with few rights on three nodes with what "weir secrets" makes: TLS for callers and between nodes,
// an access file, gossip keys and the cluster's secret.

const attackedPolicies = `policies:
  - {name: log, algorithm: sliding_log, limit: 2000, window: 1h}
  - {name: bucket, algorithm: token_bucket, limit: 100, window: 1s, on_error: closed}
  - {name: order, algorithm: sliding_log, limit: 10, window: 1h, durability: sync}
`

const attackedEnvoy = `domain: edge
descriptors:
  - {key: user, rate_limit: {policy: bucket}}
  - {key: week, rate_limit: {unit: week, requests_per_unit: 1000}}
quota_buckets:
  - {bucket: {user: "*"}, policy: bucket, key: "user={user}"}
`

// secured is a fleet whose nodes authenticate callers and each other. The fleet's own calls are the operator's.
type secured struct {
	*fleet
	tls    *tls.Config
	tokens map[string]string // by caller: operator, shop, thief
	nodes  *tls.Config       // a node's certificate, as a thief has it
}

// token is a caller's credential, on connections over TLS only.
type token string

func (c token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(c)}, nil
}
func (token) RequireTransportSecurity() bool { return true }

// startSecured starts three nodes. Callers shop and thief have the roles check and read for everything.
func startSecured(t *testing.T, prepare func(*secured)) *secured {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "secrets")
	code, _, errs := weir(t, "secrets", dir)
	must.Equal(t, code, 0, "%v", errs)
	read := func(name string) string { return string(must.Value(os.ReadFile(filepath.Join(dir, name)))(t)) }
	s := &secured{tokens: map[string]string{"operator": read("tokens/operator"), "shop": auth.NewToken(),
		"thief": auth.NewToken()}}
	access := read("weir-access/access.yaml")
	for _, name := range []string{"shop", "thief"} {
		access += fmt.Sprintf("  - {name: %s, tokens: [%q], roles: [check, read], policies: [\"*\"], namespaces: [\"*\"]}\n", name, auth.Hash(s.tokens[name]))
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(read("authorities/callers.crt")))
	s.tls = &tls.Config{RootCAs: roots, ServerName: "weir"}
	s.fleet = newFleet(t, 3, attackedPolicies, nil)
	in := func(name string) string { return filepath.Join(dir, name) }
	pair := must.Value(tls.LoadX509KeyPair(in("weir-nodes-tls/tls.crt"), in("weir-nodes-tls/tls.key")))(t)
	s.nodes = &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}
	s.args = append(s.args,
		"--envoy-config", filepath.Dir(testkit.WriteFile(t, "edge.yaml", attackedEnvoy)), "--access-file",
		testkit.WriteFile(t, "access.yaml", access),
		"--tls-cert-file", in("weir-callers-tls/tls.crt"), "--tls-key-file", in("weir-callers-tls/tls.key"),
		"--tls-client-ca-file", in("weir-callers-tls/ca.crt"),
		"--peer-tls-cert-file", in("weir-nodes-tls/tls.crt"), "--peer-tls-key-file", in("weir-nodes-tls/tls.key"),
		"--peer-tls-ca-file", in("weir-nodes-tls/ca.crt"), "--peer-tls-name", "weir-node",
		"--gossip-key-file", in("weir-cluster/gossip-keys"), "--cluster-secret-file", in("weir-cluster/secret"))
	transport := &http.Transport{TLSClientConfig: s.tls, MaxIdleConnsPerHost: 50}
	t.Cleanup(transport.CloseIdleConnections)
	s.web = &http.Client{Timeout: waitTimeout, Transport: withToken{transport, "https", s.tokens["operator"]}}
	if prepare != nil {
		prepare(s)
	}
	for _, m := range s.members {
		m.client = s.web
		s.launch(m)
	}
	for _, m := range s.members {
		m.awaitReady()
	}
	s.calm(s.members...)
	return s
}

// conn is a caller's connection to a member.
func (s *secured) conn(caller string, m *member) *grpc.ClientConn {
	s.t.Helper()
	conn := must.Value(grpc.NewClient("passthrough:///"+m.grpcAddr(),
		grpc.WithTransportCredentials(credentials.NewTLS(s.tls)),
		grpc.WithPerRPCCredentials(token(s.tokens[caller]))))(s.t)
	s.t.Cleanup(func() { conn.Close() })
	return conn
}

// callers are a caller's connections to all members.
func (s *secured) callers(caller string) (all []weirv1.LimiterClient) {
	for _, m := range s.members {
		all = append(all, weirv1.NewLimiterClient(s.conn(caller, m)))
	}
	return all
}

// send sends a request of a caller over HTTP to a member that may not listen; headers are written as name, value.
func (s *secured) send(caller string, m *member, method, path, body string,
	headers ...string) (code int, answer string, err error) {
	r := must.Value(http.NewRequest(method, "https://"+m.http+path, strings.NewReader(body)))(s.t)
	r.Header.Set("Authorization", "Bearer "+s.tokens[caller])
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := s.web.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// as is send to a member that must answer.
func (s *secured) as(caller string, m *member, method, path, body string, headers ...string) (code int, answer string) {
	s.t.Helper()
	code, answer, err := s.send(caller, m, method, path, body, headers...)
	expect.NoError(s.t, err)
	return code, answer
}

func targetOf(policy, key string) *weirv1.Target { return &weirv1.Target{Policy: policy, Key: key} }

// decide is a check of one unit.
func decide(t *testing.T, c weirv1.LimiterClient, policy, key, id string) *weirv1.Decision {
	t.Helper()
	out, err := c.Check(t.Context(),
		&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: targetOf(policy, key), RequestId: id}}})
	must.True(t, err == nil && out.Results[0].GetDecision() != nil, "%v %v", out, err)
	return out.Results[0].GetDecision()
}

// TestAttacksByCallers: what a caller with the roles check and read does to another caller's keys stays within the
// limits.
func TestAttacksByCallers(t *testing.T) {
	needsTime(t)
	plainOnly(t)
	t.Parallel()
	s := startSecured(t, nil)
	t.Run("debt without the role charge", s.debt)
	t.Run("request ids of others", s.guessIDs)
	t.Run("two operators", s.twoOperators)
	t.Run("a node that has just started", s.restarted)
	t.Run("a node's certificate", s.nodesCertificate)
}

// nodesCertificate has who holds a node's certificate, but no gossip key, tell of overrides in the name of each member
// and of one that is none, and change the gossip keys: nodes pull from members only, and operators go on changing
// overrides through all of them.
func (s *secured) nodesCertificate(t *testing.T) {
	_, page := s.as("thief", s.members[0], "GET", "/v1/status", "")
	var st struct{ Members []struct{ Name, Boot string } }
	must.NoError(t, json.Unmarshal([]byte(page), &st))
	st.Members = append(st.Members, struct{ Name, Boot string }{"thief", "1"})
	for i, m := range s.members {
		conn := must.Value(grpc.NewClient("passthrough:///"+m.ip+":"+fleetPeer,
			grpc.WithTransportCredentials(credentials.NewTLS(s.nodes))))(t)
		defer conn.Close()
		for _, of := range st.Members {
			boot := must.Value(strconv.ParseUint(of.Boot, 16, 64))(t)
			_, err := peerv1.NewOverridesClient(conn).Notify(t.Context(),
				&peerv1.NotifyOverridesRequest{Name: of.Name, Boot: boot})
			member := of.Name != m.name && of.Name != "thief"
			expect.True(t, (err == nil) == member, "%s is told of overrides by %s: %v", m.name, of.Name, err)
		}
		for _, req := range []*weirv1.GossipKeysRequest{
			{Action: weirv1.KeyAction_KEY_ACTION_ADD, Key: make([]byte, 32)},
			{Action: weirv1.KeyAction_KEY_ACTION_USE, Id: "0"},
		} {
			_, err := peerv1.NewGossipKeysClient(conn).Apply(t.Context(), req)
			expect.Equal(t, grpcstatus.Code(err), codes.PermissionDenied, "%v", err)
		}
		c, done := s.setLimit(m, "after", 500+int64(i))
		expect.True(t, done && c.claims(500+int64(i)), "%s: %+v", m.name, c)
	}
}

// debt has the thief charge 2^53 by each protocol that charges regardless of room. A bucket of 100 a second has room
// within a second.
func (s *secured) debt(t *testing.T) {
	conn := s.conn("thief", s.members[0])
	shop := s.callers("shop")[1]
	for name, attack := range map[string]func(context.Context, *grpc.ClientConn, string) error{
		"hits": manyHits, "kuadrant commit": commitKuadrant, "kuadrant report": reportKuadrant,
		"quota report": reportQuota,
		"charge":       chargeMuch, "commit": commitMuch, "loan": reportLoan,
	} {
		for range 3 {
			expect.NoError(t, attack(t.Context(), conn, name), "%s", name)
		}
		d := decide(t, shop, "bucket", "user="+name, "")
		expect.True(t, d.Allowed || time.Duration(d.GetRetryAfterNs()) <= 3*time.Second,
			"%s: the shop is to wait for %v", name, time.Duration(d.GetRetryAfterNs()))
	}
	code, top := s.as("operator", s.members[0], "GET", "/v1/keys/top", "")
	expect.True(t, code == http.StatusOK && !strings.Contains(top, fmt.Sprint(1<<52)),
		"a report counts as decisions: %d %s", code, top)
}

const much = 1 << 53 // units

// manyOf is a descriptor of a user with so many hits.
func manyOf(user string) *ratelimitv3.RateLimitRequest {
	entries := []*common.RateLimitDescriptor_Entry{{Key: "user", Value: user}}
	return &ratelimitv3.RateLimitRequest{Domain: "edge",
		Descriptors: []*common.RateLimitDescriptor{{Entries: entries, HitsAddend: wrapperspb.UInt64(much)}}}
}

func manyHits(ctx context.Context, conn *grpc.ClientConn, user string) error {
	_, err := ratelimitv3.NewRateLimitServiceClient(conn).ShouldRateLimit(ctx, manyOf(user))
	return err
}

func commitKuadrant(ctx context.Context, conn *grpc.ClientConn, user string) error {
	in := &kuadrantpb.CommitRequest{Domain: "edge", Descriptors: manyOf(user).Descriptors, ActualAmount: much}
	_, err := kuadrantpb.NewRateLimitServiceClient(conn).Commit(ctx, in)
	return denied(err)
}

func reportKuadrant(ctx context.Context, conn *grpc.ClientConn, user string) error {
	_, err := kuadrantpb.NewRateLimitServiceClient(conn).Report(ctx, manyOf(user))
	return denied(err)
}

func reportQuota(ctx context.Context, conn *grpc.ClientConn, user string) error {
	stream, err := quotav3.NewRateLimitQuotaServiceClient(conn).StreamRateLimitQuotas(ctx)
	if err != nil {
		return err
	}
	usage := bucketUsage(user)
	usage.NumRequestsAllowed = much
	in := &quotav3.RateLimitQuotaUsageReports{Domain: "edge",
		BucketQuotaUsages: []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{usage}}
	if err := stream.Send(in); err != nil {
		return err
	}
	_, err = stream.Recv() // the report was charged before
	return err
}

func bucketUsage(user string) *quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage {
	id := &quotav3.BucketId{Bucket: map[string]string{"user": user}}
	return &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{BucketId: id}
}

func chargeMuch(ctx context.Context, conn *grpc.ClientConn, user string) error {
	_, err := weirv1.NewLimiterClient(conn).Charge(ctx,
		&weirv1.ChargeRequest{Target: targetOf("bucket", "user="+user), Cost: proto.Int64(much)})
	return denied(err)
}

func commitMuch(ctx context.Context, conn *grpc.ClientConn, user string) error {
	limiter, target := weirv1.NewLimiterClient(conn), targetOf("bucket", "user="+user)
	d, err := limiter.Reserve(ctx, &weirv1.ReserveRequest{Target: target})
	if err != nil {
		return err
	}
	_, err = limiter.Commit(ctx,
		&weirv1.CommitRequest{Target: target, ReservationId: d.ReservationId, Cost: proto.Int64(much)})
	if grpcstatus.Code(err) != codes.InvalidArgument {
		return fmt.Errorf("the excess: %w", err)
	}
	return nil
}

func reportLoan(ctx context.Context, conn *grpc.ClientConn, user string) error {
	stream, err := weirv1.NewLimiterClient(conn).CheckStream(ctx)
	if err != nil {
		return err
	}
	r := &weirv1.LoanReport{Number: 1, Target: targetOf("bucket", "user="+user), Granted: much / 2, Spent: much / 2,
		Checks: much / 2}
	if err := stream.Send(&weirv1.CheckStreamRequest{Borrow: &weirv1.BorrowRequest{Borrower: 77,
		Loans: []*weirv1.LoanReport{r}}}); err != nil {
		return err
	}
	out, err := stream.Recv()
	if err == nil && out.Error != nil {
		err = errors.New(out.Error.Message)
	}
	return err
}

// denied is the error of a call that was not denied.
func denied(err error) error {
	if grpcstatus.Code(err) == codes.PermissionDenied {
		return nil
	}
	return fmt.Errorf("not denied: %w", err)
}

// guessIDs has the thief repeat the shop's request ids, through each node: it gets nothing that is the shop's.
func (s *secured) guessIDs(t *testing.T) {
	shop := s.callers("shop")[0]
	target := targetOf("order", "alice")
	mine, err := shop.Reserve(t.Context(), &weirv1.ReserveRequest{Target: target, RequestId: "order-1"})
	must.True(t, err == nil && mine.ReservationId != "", "%v %v", mine, err)
	left := decide(t, shop, "order", "alice", "order-2").Remaining
	for i, thief := range s.callers("thief") {
		got, err := thief.Reserve(t.Context(), &weirv1.ReserveRequest{Target: target, RequestId: "order-1"})
		must.True(t, err == nil && got.ReservationId != "" && (got.ReservationId != mine.ReservationId || i != 0),
			"%v, %v: the shop's is %s", got, err, mine.ReservationId)
		_, err = thief.Cancel(t.Context(), &weirv1.CancelRequest{Target: target, ReservationId: got.ReservationId})
		expect.NoError(t, err)
	}
	d := decide(t, s.callers("thief")[2], "order", "alice", "order-2")
	expect.Equal(t, d.Remaining, left-1, "are left after the thief's check of %d: it was answered as the shop's", left)
	out, err := shop.Commit(t.Context(),
		&weirv1.CommitRequest{Target: target, ReservationId: mine.ReservationId, Cost: proto.Int64(0)})
	expect.True(t, err == nil && out.Refunded == 1, "the shop's reservation: %v, %v", out, err)
}

// change is the answer to a change of an override.
type change struct {
	Override, Before struct {
		Version  string
		Settings struct{ Limit int64 }
	}
	Members []struct{ Has bool }
}

// setLimit sets the override of policy log for a key, as the operator, through a member. It returns whether that was
// done.
func (s *secured) setLimit(m *member, key string, limit int64) (c change, done bool) {
	s.t.Helper()
	body := fmt.Sprintf(`{"policy":"log","key":%q,"settings":{"limit":%d}}`, key, limit)
	code, answer := s.as("operator", m, "PUT", "/v1/overrides", body)
	err := json.Unmarshal([]byte(answer), &c)
	expect.True(s.t, code != http.StatusOK || err == nil, "%v %v", err, answer)
	return c, code == http.StatusOK
}

// claims tells whether an answer says that a limit is in force on all three members.
func (c change) claims(limit int64) bool {
	has := 0
	for _, m := range c.Members {
		if m.Has {
			has++
		}
	}
	return c.Override.Settings.Limit == limit && has == 3
}

// twoOperators change an override at once through two nodes: no answer says that a change is in force that lost to one
// that did not see it.
func (s *secured) twoOperators(t *testing.T) {
	wrong, won := 0, 0
	for i := range int64(80) {
		var got [2]change
		var ok [2]bool
		var work sync.WaitGroup
		for j := range got {
			work.Go(func() { got[j], ok[j] = s.setLimit(s.members[j], "contested", 1000+2*i+int64(j)) })
		}
		work.Wait()
		_, page := s.as("operator", s.members[2], "GET", "/v1/overrides?policy=log&key=contested", "")
		for j := range got {
			mine, other := 1000+2*i+int64(j), got[1-j]
			lost := !strings.Contains(page, fmt.Sprintf(`"limit":%d`, mine))
			if ok[j] && got[j].claims(mine) {
				won++
				if lost && other.Before.Version != got[j].Override.Version {
					wrong++
				}
			}
		}
	}
	expect.True(t, wrong <= 0 && won != 0,
		"%d of %d answers said that a change is in force on all members that had lost", wrong, won)
	t.Logf("%d of 160 changes were in force on all members", won)
}

// restarted kills a node and changes an override through it as soon as it answers: what it answers with 200 is in force
// on all members.
func (s *secured) restarted(t *testing.T) {
	for i := range int64(4) {
		m := s.members[2]
		s.setLimit(s.members[0], "restarted", 100+i)
		m.kill()
		s.launch(m)
		eventually(t, startTimeout, "a change through a node that has just started", func() bool {
			body := fmt.Sprintf(`{"policy":"log","key":"restarted","settings":{"limit":%d}}`, 200+i)
			code, answer, err := s.send("operator", m, "PUT", "/v1/overrides", body)
			if err != nil || code == http.StatusServiceUnavailable {
				return false
			}
			must.Equal(t, code, http.StatusOK, "%v", answer)
			return true
		})
		m.awaitReady()
		s.calm(s.members...)
		for _, m := range s.members {
			_, page := s.as("operator", m, "GET", "/v1/overrides?policy=log&key=restarted", "")
			expect.True(t, strings.Contains(page, fmt.Sprintf(`"limit":%d`, 200+i)),
				"%s has lost the change to %d: %s", m.name, 200+i, page)
		}
	}
}

// TestAttacksOnOpenNodes: nodes on loopback without an access file. Pages of other sites charge nothing and get no
// events of the console, and one address does not hold all of those.
func TestAttacksOnOpenNodes(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	m := startNode(t, "--policies", testkit.WriteFile(t, "policies.yaml", attackedPolicies)).awaitReady()
	send := func(method, path, body string, headers ...string) *http.Response {
		r := must.Value(http.NewRequestWithContext(t.Context(), method, "http://"+m.http+path,
			strings.NewReader(body)))(t)
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		resp := must.Value(http.DefaultClient.Do(r))(t)
		t.Cleanup(func() { resp.Body.Close() })
		return resp
	}
	for _, by := range [][]string{{"Origin", "https://evil.example"}, {"Sec-Fetch-Site", "cross-site"}} {
		for path, body := range map[string]string{
			"/v1/GetRateLimits": `{"requests":[{"name":"n","uniqueKey":"alice","hits":1,"limit":10,"duration":60000}]}`,
			"/v1/check":         `{"policy":"log","key":"page"}`,
			"/v1/checks":        `{"checks":[{"policy":"log","key":"page"}]}`,
			"/v1/refund":        `{"policy":"log","key":"page"}`, "/v1/extends": `{"extends":[]}`,
			"/v1/commits": `{"commits":[]}`,
		} {
			resp := send("POST", path, body, append([]string{"Content-Type", "text/plain"}, by...)...)
			expect.Equal(t, resp.StatusCode, http.StatusUnsupportedMediaType, "%s, %v", path, by)
		}
	}
	resp := send("POST", "/v1/check", `{"policy":"log","key":"page","cost":0}`, "Content-Type", "application/json")
	answer := string(must.Value(io.ReadAll(resp.Body))(t))
	expect.True(t, strings.Contains(answer, `"remaining":2000`), "a page has charged: %s", answer)

	expect.Equal(t, send("GET", "/console/events", "").StatusCode, http.StatusForbidden, "a page of another site")
	held := 0
	for range 100 {
		if send("GET", "/console/events", "", "Weir-Console", "page").StatusCode == http.StatusOK {
			held++
		}
	}
	expect.Equal(t, held, 8, "streams of one address")
	other := &http.Client{Transport: &http.Transport{DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 9, 9, 9)}}).DialContext}}
	r := must.Value(http.NewRequestWithContext(t.Context(), "GET", "http://"+m.http+"/console/events", nil))(t)
	r.Header.Set("Weir-Console", "page")
	resp = must.Value(other.Do(r))(t)
	defer resp.Body.Close()
	expect.Equal(t, resp.StatusCode, http.StatusOK, "another address")
}

// flooded is a secured fleet whose first node is flooded.
type flooded struct {
	*secured
	target *member
	groups []*cgroup
}

// TestAttacksOnMemory floods a node of 512 MiB with messages of many elements, Kuadrant's reservations and quota
// buckets. None is killed for its size, and the shop is answered.
func TestAttacksOnMemory(t *testing.T) {
	needsTime(t)
	plainOnly(t)
	t.Parallel()
	f := &flooded{}
	f.secured = startSecured(t, func(s *secured) {
		for _, m := range s.members {
			f.groups = append(f.groups, newCgroup(t, 512<<20))
			m.wrapper = f.groups[len(f.groups)-1].inside()
		}
	})
	f.target = f.members[0]
	t.Run("elements", f.elements)
	t.Run("JSON", f.json)
	t.Run("kuadrant", f.reservations)
	t.Run("quota buckets", f.buckets)
	t.Run("streams", f.streams)
}

// streams opens streams, as many as the thief gets, asks for everything on each, borrows of long keys, and reads
// nothing on every other one.
func (f *flooded) streams(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var work sync.WaitGroup
	var opened, ended atomic.Int64
	first := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: targetOf("log", "thief")}}}
	for c := range 100 {
		conn := f.conn("thief", f.target)
		if _, err := weirv1.NewLimiterClient(conn).Check(ctx, first, grpc.WaitForReady(true)); err != nil {
			t.Logf("the connection after %d: %v", c, err)
			break
		}
		for n := range 40 {
			work.Go(func() {
				stream, err := weirv1.NewLimiterClient(conn).CheckStream(ctx)
				if err != nil {
					ended.Add(1)
					return
				}
				if n%2 == 0 {
					work.Go(func() {
						for {
							if _, err := stream.Recv(); err != nil {
								return
							}
						}
					})
				}
				in := &weirv1.BorrowRequest{Borrower: uint64(1 + c*40 + n)}
				for i := range 500 {
					key := fmt.Sprint(strings.Repeat("x", 900), c, " ", n, " ", i)
					in.Loans = append(in.Loans, &weirv1.LoanReport{Number: 1, Target: targetOf("log", key), Want: 1e9})
				}
				for _, m := range []*weirv1.CheckStreamRequest{{Ready: true, Topology: true}, {Borrow: in},
					{Borrow: in}, {Borrow: in}} {
					if stream.Send(m) != nil {
						ended.Add(1)
						return
					}
				}
				opened.Add(1)
				<-ctx.Done()
			})
		}
	}
	eventually(t, waitTimeout, "the streams", func() bool { return opened.Load()+ended.Load() >= 3000 })
	f.survived(t)
	cancel()
	work.Wait()
	t.Logf("%d streams stayed, %d were ended", opened.Load(), ended.Load())
}

// survived sees to it that no node was killed, and that the flooded one answers.
func (f *flooded) survived(t *testing.T) {
	t.Helper()
	for i, g := range f.groups {
		n := g.kills()
		must.True(t, n <= 0, "%s was killed for its size", f.members[i].name)
	}
	shop := f.callers("shop")[0]
	check := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: targetOf("log", "quiet")}}}
	eventually(t, waitTimeout, "the shop to be answered", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		d, err := shop.Check(ctx, check)
		return err == nil && d.Results[0].GetDecision().GetAllowed()
	})
	t.Logf("%d MiB of 512 at the peak", f.groups[0].peak()>>20)
}

// elements sends messages of 4 MiB of empty elements to all methods of callers that take lists or maps, six at a time.
func (f *flooded) elements(t *testing.T) {
	sent := 0
	for _, service := range []string{
		"weir.v1.Limiter", "weir.v1.Overrides", "weir.v1.Admin", "envoy.service.ratelimit.v3.RateLimitService",
		"kuadrant.service.ratelimit.v1.RateLimitService", "envoy.service.rate_limit_quota.v3.RateLimitQuotaService",
	} {
		d := must.Value(protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service)))(t)
		methods := d.(protoreflect.ServiceDescriptor).Methods()
		for i := range methods.Len() {
			fields := methods.Get(i).Input().Fields()
			for j := range fields.Len() {
				field := fields.Get(j)
				if !field.IsList() && !field.IsMap() {
					continue
				}
				element := protowire.AppendBytes(protowire.AppendTag(nil, field.Number(), protowire.BytesType), nil)
				body := bytes.Repeat(element, (4<<20-100)/len(element))
				var work sync.WaitGroup
				for range 6 {
					sent++
					conn := f.conn("thief", f.target)
					work.Go(func() { sendRaw(t.Context(), conn, fmt.Sprintf("/%s/%s", service, methods.Get(i).Name()), body) })
				}
				work.Wait()
			}
		}
	}
	expect.True(t, sent >= 6*12, "only %d messages", sent)
	f.survived(t)
}

// json sends bodies of 4 MiB of the shortest elements, six at a time.
func (f *flooded) json(t *testing.T) {
	many := func(before, element, after string) string {
		return before + strings.Repeat(element+",", (4<<20-200)/(len(element)+1)) + element + after
	}
	pairs := func(before, after string) string {
		var b strings.Builder
		for i := 0; b.Len() < 4<<20-200; i++ {
			fmt.Fprintf(&b, `"%x":1,`, i)
		}
		return before + b.String() + `"last":1` + after
	}
	for _, r := range [][2]string{
		{"/json", many(`{"domain":"edge","descriptors":[`, "{}", "]}")},
		{"/json", many(`{"domain":"edge","descriptors":[{"entries":[`, "{}", "]}]}")},
		{"/v1/GetRateLimits", many(`{"requests":[`, "{}", "]}")},
		{"/v1/GetRateLimits", pairs(`{"requests":[{"metadata":{`, `}}]}`)},
		{"/v1/checks", many(`{"checks":[`, "{}", "]}")}, {"/v1/reserves", many(`{"reserves":[`, "{}", "]}")},
		{"/v1/extends", many(`{"extends":[`, "{}", "]}")}, {"/v1/commits", many(`{"commits":[`, "{}", "]}")},
		{"/v1/charge", pairs(`{"policy":"log","key":"k","usage":{`, "}}")},
		{"/v1/reserve", pairs(`{"policy":"log","key":"k","usage":{`, "}}")},
		{"/v1/check", many(`{"policy":"log","key":"k","limit":[`, "[]", "]}")},
		{"/v1/check", strings.Repeat("[", 4<<20-200)},
	} {
		var work sync.WaitGroup
		for range 6 {
			work.Go(func() {
				// What is not read to its end resets the connection.
				code, answer, err := f.send("thief", f.target, "POST", r[0], r[1])
				expect.True(t, err != nil || code >= 400, "%s: %d %.200s", r[0], code, answer)
			})
		}
		work.Wait()
	}
	f.survived(t)
}

// reservations keeps Kuadrant's reservations of 100 long keys each until they are rejected or, where a node has no
// memory left for the keys, answered by on_error without a reservation.
func (f *flooded) reservations(t *testing.T) {
	deadline := time.Now().Add(waitTimeout)
	c := kuadrantpb.NewRateLimitServiceClient(f.conn("thief", f.target))
	var work sync.WaitGroup
	var kept, rejected atomic.Int64
	for w := range 8 {
		work.Go(func() {
			for n := 0; rejected.Load() < 100 && time.Now().Before(deadline); n++ {
				in := &kuadrantpb.ReserveRequest{Domain: "edge", Amount: 1, Ttl: durationpb.New(time.Hour)}
				for i := range 100 {
					value := fmt.Sprint(strings.Repeat("x", 900), w, " ", n, " ", i)
					in.Descriptors = append(in.Descriptors,
						&common.RateLimitDescriptor{Entries: []*common.RateLimitDescriptor_Entry{{Key: "week",
							Value: value}}})
				}
				if out, err := c.Reserve(t.Context(), in); err == nil && out.ReservationId != "" {
					kept.Add(1)
				} else {
					rejected.Add(1)
				}
			}
		})
	}
	work.Wait()
	expect.True(t, rejected.Load() >= 100, "%d reservations were kept, and %d rejected", kept.Load(), rejected.Load())
	t.Logf("%d reservations kept, %d rejected", kept.Load(), rejected.Load())
	f.survived(t)
}

// buckets reports 600,000 buckets of long ids.
func (f *flooded) buckets(t *testing.T) {
	stream, err := quotav3.NewRateLimitQuotaServiceClient(f.conn("thief", f.target)).StreamRateLimitQuotas(t.Context())
	must.NoError(t, err)
	go func() {
		for {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	}()
	for n := range 600 {
		in := &quotav3.RateLimitQuotaUsageReports{Domain: "edge"}
		for i := range 1000 {
			usage := bucketUsage(fmt.Sprint(strings.Repeat("x", 900), n, " ", i))
			usage.NumRequestsDenied = 1
			in.BucketQuotaUsages = append(in.BucketQuotaUsages, usage)
		}
		if stream.Send(in) != nil {
			break // ended for what it takes
		}
	}
	f.survived(t)
}

// sendRaw calls a method with a message that is bytes already; the answer, an error, is nobody's.
func sendRaw(ctx context.Context, conn *grpc.ClientConn, method string, body []byte) {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method,
		grpc.ForceCodec(testkit.RawCodec{}))
	if err != nil {
		return
	}
	_ = stream.SendMsg(&body)
	_ = stream.CloseSend()
	var out []byte
	_ = stream.RecvMsg(&out)
}
