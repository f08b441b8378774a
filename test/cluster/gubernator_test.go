package clustertest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"

	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// buildGubernatorClient makes the program around Gubernator's own Go client. It is of another module, whose dependencies are many.
var buildGubernatorClient = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "gubernatorclient")
	cmd := exec.Command("go", "build", "-o", path, "./cmd/gubernatorclient")
	cmd.Dir = "../../bench"
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return path, err
})

// A v1Client asks for limits as Gubernator's callers do.
type v1Client func(context.Context, ...*pb.RateLimitReq) ([]*pb.RateLimitResp, error)

// gubernatorClient is Gubernator's own client, which asks an address.
func gubernatorClient(t *testing.T, address string) v1Client {
	t.Helper()
	path, err := buildGubernatorClient()
	if err != nil {
		t.Skipf("Gubernator's client cannot be built (cd bench && go mod download): %v", err)
	}
	cmd := exec.Command(path, address)
	stdin := must.Value(cmd.StdinPipe())(t)
	stdout := must.Value(cmd.StdoutPipe())(t)
	must.NoError(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close() // which ends it
		expect.NoError(t, cmd.Wait(), "Gubernator's client")
	})
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 4<<20)
	var mu sync.Mutex
	read := func() ([]byte, error) {
		if !lines.Scan() {
			return nil, fmt.Errorf("it has ended: %v", lines.Err())
		}
		var failure struct{ Failed string }
		if json.Unmarshal(lines.Bytes(), &failure) == nil && failure.Failed != "" {
			return nil, errors.New(failure.Failed)
		}
		return lines.Bytes(), nil
	}
	health := new(pb.HealthCheckResp)
	text, err := read()
	if err == nil {
		err = protojson.Unmarshal(text, health)
	}
	must.True(t, err == nil && health.Status == "healthy" && health.PeerCount == 3 &&
		health.AdvertiseAddress == address, "HealthCheck: %v, %v", health, err)
	return func(_ context.Context, requests ...*pb.RateLimitReq) ([]*pb.RateLimitResp, error) {
		mu.Lock()
		defer mu.Unlock()
		line, err := protojson.Marshal(&pb.GetRateLimitsReq{Requests: requests})
		if err != nil {
			return nil, err
		}
		if _, err := stdin.Write(append(line, '\n')); err != nil {
			return nil, err
		}
		if line, err = read(); err != nil {
			return nil, err
		}
		out := new(pb.GetRateLimitsResp)
		return out.Responses, protojson.Unmarshal(line, out)
	}
}

// v1Caller is the generated client, which asks many at a time.
func v1Caller(t *testing.T, address string) v1Client {
	conn := must.Value(grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	t.Cleanup(func() { conn.Close() })
	c := pb.NewV1Client(conn)
	return func(ctx context.Context, requests ...*pb.RateLimitReq) ([]*pb.RateLimitResp, error) {
		out, err := c.GetRateLimits(ctx, &pb.GetRateLimitsReq{Requests: requests}, grpc.WaitForReady(true))
		return out.GetResponses(), err
	}
}

// bucketOf is a request for hits of a limit of 16 in a day.
func bucketOf(key string, hits int64) *pb.RateLimitReq {
	return &pb.RateLimitReq{Name: "requests", UniqueKey: key, Hits: hits, Limit: 16, Duration: 86_400_000}
}

// TestGubernator: Gubernator's own client, through a node that owns nothing of what is asked.
func TestGubernator(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3)
	entry := nodes[1]
	own := gubernatorClient(t, entry.grpc)
	addresses := make(map[string]bool)
	for _, p := range nodes {
		addresses[p.grpc] = true
	}

	// The answers name the owner where that is another node.
	var requests []*pb.RateLimitReq
	for _, key := range keysNamed("foreign", 100) {
		requests = append(requests, bucketOf(key, 0))
	}
	answers, err := own(t.Context(), requests...)
	must.True(t, err == nil && len(answers) == len(requests), "%d answers, %v", len(answers), err)
	var keys []string
	for i, a := range answers {
		owner := a.Metadata["owner"]
		expect.True(t, a.Error == "" && a.Remaining == 16 && owner != entry.grpc && (owner == "" || addresses[owner]),
			"%s: %v", requests[i].UniqueKey, a)
		if owner != "" {
			keys = append(keys, requests[i].UniqueKey)
		}
	}
	must.True(t, len(keys) >= 20, "only %d of 100 keys are another node's", len(keys))

	one := func(client v1Client, r *pb.RateLimitReq) *pb.RateLimitResp {
		t.Helper()
		out, err := client(t.Context(), r)
		must.True(t, err == nil && len(out) == 1 && out[0].Error == "", "%v: %v, %v", r, out, err)
		return out[0]
	}
	third := v1Caller(t, nodes[2].grpc)
	for _, key := range keys[:4] {
		var batch []*pb.RateLimitReq
		for range 20 {
			batch = append(batch, bucketOf(key, 1))
		}
		answers := must.Value(own(t.Context(), batch...))(t)
		for i, a := range answers {
			want := int64(max(15-i, 0))
			expect.True(t, a.Error == "" && (a.Status == pb.Status_UNDER_LIMIT) == (i < 16) && a.Remaining == want &&
				a.Limit == 16, "%s, hit %d: %v", key, i, a)
		}
		// The same state through the other nodes, and as the inline limit that it is.
		body := fmt.Sprintf(`{"requests":[{"name":"requests","unique_key":%q,"hits":-3,"limit":16,"duration":86400000}]}`, key)
		code, _, text, err := nodes[0].post("/v1/GetRateLimits", "application/json", []byte(body))
		expect.True(t, err == nil && code == http.StatusOK &&
			strings.Contains(strings.ReplaceAll(string(text), " ", ""), `"remaining":"3"`),
			"negative hits as JSON: %d %s, %v", code, text, err)
		d, err := nodes[0].check(fmt.Sprintf(`{"namespace":"gubernator/requests","limit":{"algorithm":"fixed_window","limit":16,"window":"24h"},"key":%q,"cost":2}`, key))
		expect.True(t, err == nil && d.Allowed && d.Remaining == 1, "as an inline limit: %+v, %v", d, err)
		drain := bucketOf(key, 5)
		drain.Behavior = pb.Behavior_DRAIN_OVER_LIMIT
		a := one(third, drain)
		expect.True(t, a.Status == pb.Status_OVER_LIMIT && a.Remaining == 0, "drained: %v", a)
		global := bucketOf(key, 1)
		global.Behavior = pb.Behavior_GLOBAL
		a = one(own, global)
		expect.True(t, a.Status == pb.Status_OVER_LIMIT && a.Remaining == 0, "global, which is exact here: %v", a)
		wider := bucketOf(key, 0)
		wider.Limit, wider.Duration = 20, 43_200_000
		a = one(own, wider)
		expect.Equal(t, a.Remaining, 4, "another limit and duration: %v", a)
		reset := bucketOf(key, 1)
		reset.Behavior = pb.Behavior_RESET_REMAINING
		a = one(own, reset)
		expect.Equal(t, a.Remaining, 16, "reset: %v", a)
		a = one(third, bucketOf(key, 1))
		expect.Equal(t, a.Remaining, 15, "after a reset: %v", a)
		leaky := bucketOf(key, 7)
		leaky.Algorithm, leaky.Burst = pb.Algorithm_LEAKY_BUCKET, 10
		a = one(own, leaky)
		expect.Equal(t, a.Remaining, 3, "a leaky bucket: %v", a)
	}
	_, err = own(t.Context(), make([]*pb.RateLimitReq, 0)...)
	expect.NoError(t, err, "nothing")
	many := make([]*pb.RateLimitReq, 1001)
	for i := range many {
		many[i] = bucketOf("many", 1)
	}
	_, err = own(t.Context(), many...)
	expect.True(t, err != nil && strings.Contains(err.Error(), "OutOfRange") &&
		strings.Contains(err.Error(), "max size is '1000'"), "1001 requests: %v", err)

	t.Run("exact", func(t *testing.T) {
		var askers []asker
		for _, p := range nodes {
			caller := v1Caller(t, p.grpc)
			askers = append(askers, func(ctx context.Context, key string) (bool, error) {
				out, err := caller(ctx, &pb.RateLimitReq{Name: "exact", UniqueKey: key, Hits: 1, Limit: 100, Duration: 3_600_000, Behavior: pb.Behavior_GLOBAL})
				if err == nil && out[0].Error != "" {
					err = errors.New(out[0].Error)
				}
				return err == nil && out[0].Status == pb.Status_UNDER_LIMIT, err
			})
		}
		wantEach(t, ask(t, keysNamed("v1", 3), 300, askers), 100)
	})
}
