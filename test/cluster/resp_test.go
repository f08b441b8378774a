package clustertest

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const fleetRESP = "6380"

// respClient is a client of the Redis protocol.
func respClient(t *testing.T, address string, protocol int) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: address, Protocol: protocol, ReadTimeout: 20 * time.Second, MaxRetries: -1})
	t.Cleanup(func() { c.Close() })
	return c
}

// respAsker asks for a policy over the Redis protocol.
func respAsker(c *redis.Client, policy string) asker {
	return func(ctx context.Context, key string) (bool, error) {
		d, err := weirCheck(ctx, c, "WEIR.CHECK", policy, key)
		if err == nil && d["failed_open"] {
			err = errFailedOpen
		}
		return d["allowed"], err
	}
}

// weirCheck sends a command that a decision answers, and returns its booleans.
func weirCheck(ctx context.Context, c *redis.Client, args ...any) (map[string]bool, error) {
	reply, err := c.Do(ctx, args...).Result()
	if err != nil {
		return nil, err
	}
	out := make(map[string]bool)
	switch m := reply.(type) {
	case map[any]any:
		for k, v := range m {
			out[fmt.Sprint(k)] = v == true
		}
	case []any:
		for i := 0; i+1 < len(m); i += 2 {
			out[fmt.Sprint(m[i])] = m[i+1] == int64(1)
		}
	default:
		return nil, fmt.Errorf("answered %T", reply)
	}
	return out, nil
}

// throttle asks CL.THROTTLE for units of a bucket of 16, which come back in a day.
func throttle(ctx context.Context, c redis.Cmdable, key string, quantity int) *redis.Cmd {
	return c.(interface {
		Do(context.Context, ...any) *redis.Cmd
	}).Do(ctx, "CL.THROTTLE", key, 15, 16, 86400, quantity)
}

// forwarded counts what a node has sent to others.
func (p *process) forwarded() int {
	_, page := p.get("/metrics")
	sum := 0
	for _, m := range regexp.MustCompile(`(?m)^weir_forwarded_total\{.*\} (\d+)`).FindAllStringSubmatch(page, -1) {
		n, _ := strconv.Atoi(m[1]) // digits
		sum += n
	}
	return sum
}

// foreign returns n keys that other nodes than the asked one decide for; look asks about a key without charging it.
func foreign(t *testing.T, p *process, look func(key string) error, n int) []string {
	t.Helper()
	var keys []string
	for _, key := range keysNamed("foreign", 20*n) {
		before := p.forwarded()
		must.NoError(t, look(key))
		if p.forwarded() > before {
			if keys = append(keys, key); len(keys) == n {
				return keys
			}
		}
	}
	t.Fatalf("only %d of %d keys are another node's", len(keys), 20*n)
	return nil
}

// TestRESP: the usual clients, through a node that owns nothing of what is asked.
func TestRESP(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--resp-port=0", "--policies", writeFile(t, "policies.yaml", exactPolicies))
	entry := nodes[1]
	two, three := respClient(t, entry.resp, 2), respClient(t, entry.resp, 3)
	keys := foreign(t, entry, func(key string) error { return throttle(t.Context(), three, key, 0).Err() }, 4)

	t.Run("go-redis", func(t *testing.T) {
		for i, c := range []*redis.Client{two, three} {
			pipe := c.Pipeline()
			var cmds []*redis.Cmd
			for range 20 {
				cmds = append(cmds, throttle(t.Context(), pipe, keys[i], 1))
			}
			if _, err := pipe.Exec(t.Context()); err != nil {
				t.Fatal(err)
			}
			for n, cmd := range cmds {
				got, err := cmd.Int64Slice()
				expect.True(t, err == nil && len(got) == 5 && (got[0] == 0) == (n < 16) && got[1] == 16 &&
					got[2] == int64(max(15-n, 0)), "protocol %d, command %d: %v, %v", i+2, n, got, err)
			}
			// The same state over HTTP, through another node.
			d, err := nodes[0].check(fmt.Sprintf(`{"namespace":"redis","key":%q,"limit":{"algorithm":"token_bucket","limit":16,"window":"24h","capacity":16}}`, keys[i]))
			expect.True(t, err == nil && !d.Allowed && d.Limit == 16 && d.Remaining == 0, "over HTTP: %+v, %v", d, err)
			got, err := weirCheck(t.Context(), c, "WEIR.CHECK", "token_bucket", keys[i], 100)
			expect.True(t, err == nil && got["allowed"] && !got["failed_open"], "WEIR.CHECK: %v, %v", got, err)
			d = nodes[0].peek("token_bucket", keys[i])
			expect.Equal(t, d.Remaining, 0, "over HTTP: %+v", d)
			got, err = weirCheck(t.Context(), c, "WEIR.PEEK", "token_bucket", keys[i])
			expect.True(t, err == nil && !got["allowed"], "WEIR.PEEK: %v, %v", got, err)
		}
	})

	t.Run("redis-cli", func(t *testing.T) {
		ask := redisTool(t, "redis-cli", entry.resp)
		for _, c := range []struct{ args, want string }{
			{"PING", "PONG"}, {"CL.THROTTLE " + keys[2] + " 15 30 60", "0\n16\n15\n-1\n2"}, {"CL.THROTTLE " + keys[2] + " 15 30 60 17", "1\n16\n15\n-1\n2"},
			{"-3 --json WEIR.PEEK token_bucket " + keys[2], `{"allowed":true,"limit":100,"remaining":100,"retry_after_ms":0,"reset_after_ms":0,"delay_ms":0,"shadow":false,"degraded":false,"failed_open":false,"near_limit":false,"banned":false}`},
			{"GET a", "ERR unknown command 'GET', with args beginning with: 'a'"}, {"COMMAND COUNT", "13"},
		} {
			expect.Equal(t, strings.TrimSpace(ask(strings.Fields(c.args)...)), c.want, "redis-cli %s", c.args)
		}
	})

	t.Run("redis-benchmark", func(t *testing.T) {
		// 32 connections with 50 commands on their way ask one key, of which a hundred are to pass.
		out := redisTool(t, "redis-benchmark", entry.resp)("-n", "5000", "-c", "32", "-P", "50", "--csv", "WEIR.CHECK", "token_bucket", keys[3])
		expect.True(t, !strings.Contains(strings.ToLower(out), "error from server"), "it says: %s", out)
		d := nodes[2].peek("token_bucket", keys[3])
		expect.True(t, d.Remaining == 0 && !d.Allowed, "afterwards: %+v", d)
	})

	t.Run("exact", func(t *testing.T) {
		var askers []asker
		for i, p := range nodes {
			askers = append(askers, respAsker(respClient(t, p.resp, 2+i%2), "sliding_log"), httpAsker(p, `"policy":"sliding_log"`))
		}
		wantEach(t, ask(t, keysNamed("resp", 3), 300, askers), 100)
	})
}

// redisTool returns a function that runs a tool of Redis against an address, and returns what it writes. A tool that is not installed
// has the test skipped.
func redisTool(t *testing.T, name, address string) func(args ...string) string {
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed (Debian: redis-tools)", name)
	}
	host, port, err := net.SplitHostPort(address)
	must.NoError(t, err)
	return func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), path, append([]string{"-h", host, "-p", port}, args...)...).CombinedOutput()
		must.True(t, err == nil, "%s %v: %v: %s", name, args, err, out)
		return string(out)
	}
}
