package clustertest

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// fleet is a cluster whose nodes come and go: n1, n2, … have their names and addresses for good. n1, n2 and n3 are the
// voters, and every node knows all the others' addresses as seeds, so that any of them can come back in any order.
type fleet struct {
	t       *testing.T
	members []*member
	started []*process // all there have been
	args    []string
	network *network // nil: loopback
	web     *http.Client
}

// member is a place for a node, in which one process after another may run.
type member struct {
	*process // nil before the first
	name, ip string
	conn     *grpc.ClientConn // these three reach whatever process runs there
	limiter  weirv1.LimiterClient
	client   *http.Client
	wrapper  []string
	program  string // empty: the binary under test
}

// The ports are those of the documentation: each member has an address of its own.
const (
	fleetHTTP   = "8080"
	fleetGRPC   = "8081"
	fleetGossip = "7946"
	fleetPeer   = "7947"
)

// fleets counts the fleets of this process, so that each has addresses of its own.
var fleets atomic.Int32

// newFleet prepares a fleet of at most size nodes with the given policies. Without a network they are on addresses of
// the loopback interface.
func newFleet(t *testing.T, size int, policies string, cut *network) *fleet {
	t.Helper()
	f := &fleet{t: t, network: cut, args: []string{"--policies", testkit.WriteFile(t, "policies.yaml", policies)}}
	transport := &http.Transport{MaxIdleConnsPerHost: 200, DialContext: f.dial}
	f.web = &http.Client{Timeout: 40 * time.Second, Transport: transport}
	t.Cleanup(transport.CloseIdleConnections)
	var subnet string
	if cut != nil {
		subnet = cut.subnet
	} else {
		subnet = freeSubnet(t)
	}
	var voters, seeds []string
	for i := range size {
		m := &member{name: "n" + strconv.Itoa(i+1), ip: subnet + strconv.Itoa(i+1)}
		if i < 3 {
			voters = append(voters, m.name)
		}
		seeds = append(seeds, m.ip+":"+fleetGossip)
		if cut != nil {
			m.wrapper = cut.inside(i)
		}
		f.reach(m)
		f.members = append(f.members, m)
	}
	f.args = append(f.args, "--voters", strings.Join(voters, ","), "--join", strings.Join(seeds, ","),
		"--http-port", fleetHTTP, "--grpc-port", fleetGRPC, "--gossip-port", fleetGossip, "--peer-port", fleetPeer,
		"--timeout", "1s", "--grace", "30s")
	return f
}

// freeSubnet returns loopback addresses that are this test's until it ends: a listener on one of them keeps other test
// processes out.
func freeSubnet(t *testing.T) string {
	t.Helper()
	for range 100 {
		subnet := fmt.Sprintf("127.%d.%d.", 64+os.Getpid()%128, 1+fleets.Add(1))
		if l, err := net.Listen("tcp", subnet+"254:"+fleetGossip); err == nil {
			t.Cleanup(func() { l.Close() })
			return subnet
		}
	}
	t.Fatal("no free addresses of the loopback interface")
	return ""
}

// reach makes the clients of a member.
func (f *fleet) reach(m *member) {
	f.t.Helper()
	conn := must.Value(grpc.NewClient("passthrough:///"+m.ip+":"+fleetGRPC,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return f.dial(ctx, "tcp", addr) }),
		// A node that was away is to be asked again as soon as it is back.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1,
				MaxDelay: 20 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}),
	))(f.t)
	f.t.Cleanup(func() { conn.Close() })
	m.conn, m.limiter, m.client = conn, weirv1.NewLimiterClient(conn), f.web
}

// dial reaches the nodes, wherever they are.
func (f *fleet) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if f.network != nil {
		return f.network.dial(ctx, network, addr)
	}
	return new(net.Dialer).DialContext(ctx, network, addr)
}

// launch starts a member's process. It does not wait for it to be ready.
func (f *fleet) launch(m *member, args ...string) {
	f.t.Helper()
	program := m.program
	if program == "" {
		program = binary(f.t)
	}
	all := []string{"run", "--name", m.name, "--bind", m.ip}
	if f.network != nil {
		all = append(all, "--insecure") // its addresses are beyond loopback, though nobody else reaches them
	}
	m.process = launchWith(f.t, m.wrapper, program, append(append(all, f.args...), args...)...)
	m.process.web = f.web
	m.process.name, m.http = m.name, m.ip+":"+fleetHTTP
	f.started = append(f.started, m.process)
}

// start starts members, all at once, and waits until they are ready.
func (f *fleet) start(members ...*member) {
	f.t.Helper()
	for _, m := range members {
		f.launch(m)
	}
	for _, m := range members {
		m.awaitReady()
	}
}

// leave ends members' processes in good order, all at once. It returns how long that took.
func (f *fleet) leave(members ...*member) time.Duration {
	f.t.Helper()
	began := time.Now()
	for _, m := range members {
		m.signal(syscall.SIGTERM)
	}
	for _, m := range members {
		expect.Equal(f.t, m.exit(fleetGrace), 0, "%s: exit status after SIGTERM", m.name)
	}
	return time.Since(began)
}

// fleetGrace is the grace time of the nodes and what they take beyond it to say goodbye.
const fleetGrace = 35 * time.Second

// calm waits until the given members are a cluster to themselves, own all partitions and move none, and the copies are
// where they belong. It returns how long that took.
func (f *fleet) calm(members ...*member) time.Duration {
	f.t.Helper()
	began := time.Now()
	deadline := began.Add(90 * time.Second)
	const quiet = 3 // looks in a row that must find it so, since a move may be about to begin
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for found := 0; found < quiet; <-tick.C {
		trouble := ""
		for _, m := range members {
			if trouble = m.trouble(len(members)); trouble != "" {
				break
			}
		}
		found++
		if trouble != "" {
			found = 0
			must.True(f.t, !time.Now().After(deadline),
				"waited %v in vain for the cluster to be calm: %s", time.Since(began).Round(time.Second), trouble)
		}
	}
	return time.Since(began)
}

// trouble says why, as a node sees it, the cluster is not yet calm; it is empty when it is.
func (m *member) trouble(size int) string {
	st, err := m.overview()
	if err != nil {
		return err.Error()
	}
	for _, other := range st.Members {
		if other.State != "active" || !other.Reachable {
			return fmt.Sprintf("%s sees %s as %s, reachable %t", m.name, other.Name, other.State, other.Reachable)
		}
		if o := other.Ownership; o.Held != other.Partitions || o.Moving+o.Awaited > 0 || o.Degraded > 0 && size > 1 {
			return fmt.Sprintf("%s, to have %d: %+v", other.Name, other.Partitions, o)
		}
	}
	if !st.Ready || len(st.Members) != size {
		return fmt.Sprintf("%s is ready %t (%s), sees %d members of %d", m.name, st.Ready, st.ReadyDetail,
			len(st.Members), size)
	}
	return ""
}

// fetch reads a page of a node that may be away.
func (p *process) fetch(path string) (code int, page []byte, err error) {
	resp, err := p.web.Get("http://" + p.http + path)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	page, err = io.ReadAll(resp.Body)
	return resp.StatusCode, page, err
}
