package node

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// seen is what a page of the console is told.
type seen struct {
	Roles  []string
	Status struct {
		Node    string
		Members []struct{ Name string }
	}
	Policies struct{ Policies []struct{ Name string } }
	History  struct{ Policies map[string][][6]uint64 }
	Top      map[string]struct {
		Keys []struct{ Policy, Key string }
	}
}

// stream reads events until they end; each call of the function returned is the next one, and false at the end.
func stream(t *testing.T, n *Node, token string) func() (seen, bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, "GET", "http://"+addrOf(n.listeners.http)+"/console/events", nil)
	must.NoError(t, err)
	r.Header.Set("Weir-Console", "page")
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp := must.Value(http.DefaultClient.Do(r))(t)
	t.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(resp.Body)
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	lines := bufio.NewReader(resp.Body)
	return func() (s seen, ok bool) {
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return s, false
			}
			if data, ok := strings.CutPrefix(line, "data: "); ok {
				must.NoError(t, json.Unmarshal([]byte(data), &s), "%v", line)
				return s, true
			}
		}
	}
}

// TestConsoleStream: what a caller sees is what its roles let it see at that moment, and the stream ends with its rights.
func TestConsoleStream(t *testing.T) {
	t.Parallel()
	reader, all := auth.NewToken(), auth.NewToken()
	access := func(roles string) []byte {
		return fmt.Appendf(nil, `callers:
  - {name: reader, tokens: [%s], roles: [%s]}
  - {name: all, tokens: [%s], roles: [read, check, keys], policies: [login]}
`, auth.Hash(reader), roles, auth.Hash(all))
	}
	cfg := testConfig(t, "node")
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml", string(access("read")))
	n := mustSettle(t, cfg)
	resp, text := send(t, n, "POST", "/v1/check", all, `{"policy":"login","key":"alice"}`)
	must.Equal(t, resp.StatusCode, http.StatusOK, "%v", text)
	next := stream(t, n, all)
	s, ok := next()
	expect.True(t, ok && len(s.Top) == 3 && len(s.Top["busiest"].Keys) == 1 &&
		s.Top["busiest"].Keys[0].Key == "alice" && strings.Join(s.Roles, ",") == "check,read,keys" &&
		s.Status.Node == "node" && len(s.Status.Members) == 1 && len(s.Policies.Policies) == 1 &&
		s.History.Policies["login"][0][0] == 1, "%t %+v", ok, s)
	reads := stream(t, n, reader)
	s, ok = reads()
	expect.True(t, ok && s.Top == nil && strings.Join(s.Roles, ",") == "read", "who may only read sees %t %+v", ok, s)
	must.NoError(t, os.WriteFile(cfg.Security.AccessFile, access("topology"), 0o600))
	n.Reload()
	for until := time.Now().Add(20 * time.Second); ; {
		if _, ok := reads(); !ok {
			break
		}
		must.True(t, !time.Now().After(until), "the stream outlives the role")
	}
	_, ok = next()
	expect.True(t, ok, "the other stream has ended, too")
	stopped := make(chan struct{})
	go func() { defer close(stopped); n.Stop() }()
	for ok := true; ok; {
		_, ok = next()
	}
	<-stopped
}

func TestNoConsole(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.NoConsole = true
	n := mustStart(t, cfg)
	for _, path := range []string{"/console", "/console/app.js", "/console/events"} {
		status, body := get(t, n, path)
		expect.True(t, status == http.StatusNotFound, "%s: %d %s", path, status, body)
	}
	_, index := get(t, n, "/")
	expect.True(t, !strings.Contains(index, "console"), "the index names it:\n%s", index)
}
