package node

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/client"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func TestReadSecret(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	key := func(content string) ring.HashKey {
		t.Helper()
		k := must.Value(readSecret(testkit.WriteFile(t, "secret", content)))(t)
		return k
	}
	// Nodes of different builds must agree: this value, worked out with another HKDF, never changes.
	got, want := hex.EncodeToString(key(secret).Bytes()), "2101ffdecc97c08b97fb69c47234600e"
	expect.True(t, got == want, "%s, was %s", got, want)
	expect.Equal(t, key(secret), key(" "+secret+"\n"), "space around the secret counts")
	expect.True(t, key(secret) != key(secret+"0"), "different secrets, one key")
	_, err := readSecret(testkit.WriteFile(t, "secret", secret[:minSecret-1]))
	expect.True(t, err != nil && !strings.Contains(err.Error(), secret[:minSecret-1]), "%v", err)
}

// topologyOf asks a node who owns which keys.
func topologyOf(t *testing.T, n *Node, token string) (*weirv1.TopologyResponse, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(bearer(t, token))
	defer cancel()
	stream := must.Value(weirv1.NewLimiterClient(dialed(t, n)).CheckStream(ctx))(t)
	must.NoError(t, stream.Send(&weirv1.CheckStreamRequest{Topology: true}))
	out, err := stream.Recv()
	if err == nil && out.Error != nil {
		err = status.Error(codes.Code(out.Error.Code), out.Error.Message)
	}
	return out.GetTopology(), err
}

// The hash key goes to callers with the role topology, and nowhere else.
func TestHashKeyIsToldToWhoMayKnow(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	file := testkit.WriteFile(t, "secret", secret)
	key := must.Value(readSecret(file))(t)
	n, shop, all, book := withAccess(t, func(cfg *Config) { cfg.Security.ClusterSecretFile = file })
	told, err := topologyOf(t, n, all)
	expect.True(t, err == nil && string(told.GetHashKey()) == string(key.Bytes()) &&
		told.GetRingSettings() == ring.SettingsFingerprint(key), "%v, %v", told, err)
	told, err = topologyOf(t, n, shop)
	expect.Equal(t, status.Code(err), codes.PermissionDenied, "%v, %v", told, err)
	seen := book.String() + metricsOf(t, n)
	for _, path := range []string{"/v1/status", "/v1/policies", "/readyz", "/healthz"} {
		_, page := send(t, n, "GET", path, all, "")
		seen += page
	}
	for _, form := range []string{secret, string(key.Bytes()), hex.EncodeToString(key.Bytes()), base64.StdEncoding.EncodeToString(key.Bytes()), fmt.Sprint(key.Bytes())} {
		expect.True(t, !strings.Contains(seen, form), "%q is in what the node says", form)
	}
}

// Without gossip a node needs no secret for keys that nobody can aim.
func TestNodesWithoutGossipHaveHashKeysOfTheirOwn(t *testing.T) {
	t.Parallel()
	var keys []string
	for _, gossip := range []Port{PortOff, PortOff, PortAny} {
		cfg := testConfig(t, "node")
		if cfg.GossipPort = gossip; gossip == PortOff {
			cfg.PeerPort = PortOff
		}
		n := mustSettle(t, cfg)
		told := must.Value(topologyOf(t, n, ""))(t)
		keys = append(keys, string(told.GetHashKey()))
	}
	expect.True(t, len(keys[0]) == ring.HashKeySize && len(keys[1]) == ring.HashKeySize && keys[0] != keys[1] &&
		keys[2] == "", "%d, %d and %d bytes", len(keys[0]), len(keys[1]), len(keys[2]))
}

// TestClientKnowsOwnersUnderASecret: once it has learned the ring, a client asks owners, and nodes forward nothing.
func TestClientKnowsOwnersUnderASecret(t *testing.T) {
	t.Parallel()
	file := testkit.WriteFile(t, "secret", "0123456789abcdef0123456789abcdef")
	nodes := startCluster(t, "a b", func(_ int, cfg *Config) { cfg.Security.ClusterSecretFile = file })
	c := must.Value(client.Dial(t.Context(), nodes[0].GRPCAddr()+","+nodes[1].GRPCAddr(), client.WithTimeout(testkit.Patience)))(t)
	t.Cleanup(func() { c.Close() })
	forwarded := func() (sum float64) {
		for _, n := range nodes {
			for _, m := range regexp.MustCompile(`(?m)^weir_forwarded_total{answered="true"} (.*)$`).FindAllStringSubmatch(metricsOf(t, n), -1) {
				v := must.Value(strconv.ParseFloat(m[1], 64))(t)
				sum += v
			}
		}
		return sum
	}
	round := 0
	testkit.Eventually(t, "the owners to be asked", func() bool {
		before := forwarded()
		round++
		for i := range 50 {
			_, err := c.Policy("login").Allow(t.Context(), fmt.Sprintf("%d-%d", round, i))
			must.NoError(t, err)
		}
		return forwarded() == before
	})
}
