package resp

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

const policies = `policies:
  - {name: login, algorithm: sliding_log, limit: 2, window: 1m}
  - {name: seats, algorithm: concurrency, limit: 2, ttl: 1m}
`

// clock is a limiter's clock that stands still.
type clock struct {
	mu  sync.Mutex
	now time.Duration
}

func (c *clock) set(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = d
}

func (c *clock) instant() algo.Instant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return algo.Instant{Mono: int64(time.Hour + c.now), Wall: int64(c.now)}
}

// serve starts a Server in front of a node alone, whose clock stands still. edit may change its configuration.
func serve(t testing.TB, edit func(*Config)) (address string, s *Server, at *clock) {
	t.Helper()
	set := must.Value(policy.Parse("policies", []byte(policies)))(t)
	at = new(clock)
	l := limiter.New(limiter.Config{Policies: set, Clock: at.instant})
	t.Cleanup(l.Close)
	open := auth.New(auth.Config{Denied: func(string, string, net.Addr, string) {}})
	cfg := Config{
		Service: open.Service("resp", l), Version: "v1",
		Authenticate: func(ctx context.Context, c auth.Credentials) (context.Context, *auth.Denial) {
			return open.Authorize(ctx, "resp", auth.RoleOpen, c)
		},
		Current: func(ctx context.Context) bool { return open.Demand(ctx, auth.RoleOpen, limit.Target{}) == nil },
		Caller:  func(context.Context) string { return "" },
		Decided: func(time.Duration) {}, Failed: func(string) {}, Suspicious: func(net.Addr) {},
	}
	if edit != nil {
		edit(&cfg)
	}
	s = New(cfg)
	listener := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := make(chan error, 1)
	go func() { served <- s.Serve(listener) }()
	t.Cleanup(func() {
		listener.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		expect.NoError(t, errors.Join(s.Shutdown(ctx), <-served))
	})
	return listener.Addr().String(), s, at
}

// withTokens has a Server know the callers of an access file, and tells why it denies some.
func withTokens(t testing.TB, denied *[]string) func(*Config) {
	list := must.Value(auth.Parse("access", []byte(`callers:
  - {name: web, tokens: [`+auth.Hash("secret-of-web")+`], roles: [check], policies: [login], namespaces: [redis]}
  - {name: eye, tokens: [`+auth.Hash("secret-of-eye")+`], roles: [read]}
`)))(t)
	return withCallers(func() *auth.Callers { return list }, denied)
}

// withCallers is withTokens for callers that may change.
func withCallers(callers func() *auth.Callers, denied *[]string) func(*Config) {
	var mu sync.Mutex
	a := auth.New(auth.Config{Callers: callers, Denied: func(_, reason string, _ net.Addr, _ string) {
		mu.Lock()
		defer mu.Unlock()
		if denied != nil {
			*denied = append(*denied, reason)
		}
	}})
	return func(c *Config) {
		c.Service, c.Tokens = a.Service("resp", c.Service.(limiter.BatchService)), true
		c.Authenticate = func(ctx context.Context, cr auth.Credentials) (context.Context, *auth.Denial) {
			return a.Authorize(ctx, "resp", auth.RoleOpen, cr)
		}
		c.Current = func(ctx context.Context) bool { return a.Demand(ctx, auth.RoleOpen, limit.Target{}) == nil }
	}
}

// TestWithdrawnToken: a connection whose token was withdrawn has no command any more but those that are open to
// strangers.
func TestWithdrawnToken(t *testing.T) {
	var list atomic.Pointer[auth.Callers]
	access := func(token string) {
		text := "callers: [{name: web, tokens: [" + auth.Hash(token) + "], roles: [check], policies: [login]}]"
		list.Store(must.Value(auth.Parse("access", []byte(text)))(t))
	}
	access("secret-of-web")
	address, _, _ := serve(t, withCallers(list.Load, nil))
	conn := must.Value(net.Dial("tcp", address))(t)
	defer conn.Close()
	in := bufio.NewReader(conn)
	ask := func(command, want string) {
		t.Helper()
		_, err := io.WriteString(conn, command+"\n")
		must.NoError(t, err)
		line, err := in.ReadString('\n')
		expect.True(t, err == nil && strings.HasPrefix(line, want), "%s: %q %v, want %q", command, line, err, want)
	}
	ask("AUTH secret-of-web", "+OK")
	ask("CLIENT ID", ":")
	access("another")
	for _, command := range []string{"INFO", "CLIENT ID", "COMMAND COUNT", "ECHO a", "SELECT 0", "HELLO 2"} {
		ask(command, "-NOAUTH ")
	}
	ask("PING", "+PONG")
	ask("AUTH another", "+OK")
	ask("CLIENT ID", ":")
}

// talk sends what is given, ends its half of the connection, and returns all that is answered.
func talk(t testing.TB, address, in string) string {
	t.Helper()
	conn := must.Value(net.Dial("tcp", address))(t)
	defer conn.Close()
	go func() {
		_, _ = io.WriteString(conn, in)      // the answers tell
		_ = conn.(*net.TCPConn).CloseWrite() // likewise
	}()
	out, err := io.ReadAll(conn)
	must.True(t, err == nil, "%.100q: %v after %q", in, err, out)
	return string(out)
}

// command is a command as clients send it.
func send(args ...string) string {
	var b []byte
	b = appendArray(b, len(args))
	for _, a := range args {
		b = appendBulk(b, a)
	}
	return string(b)
}

// TestThrottle is redis-cell's own test of its limiter (redis-cell-impl/src/lib.rs, it_rate_limits), as CL.THROTTLE
// answers it: times are rounded up to seconds.
func TestThrottle(t *testing.T) {
	address, _, at := serve(t, nil)
	for i, c := range []struct {
		now, quantity                      int
		limited, remaining, retry, resetMS int
	}{
		{0, 6, 1, 5, -1, 0}, // can never pass
		{0, 1, 0, 4, -1, 1000},
		{0, 1, 0, 3, -1, 2000},
		{0, 1, 0, 2, -1, 3000},
		{0, 1, 0, 1, -1, 4000},
		{0, 1, 0, 0, -1, 5000},
		{0, 1, 1, 0, 1, 5000},
		{0, 0, 0, 0, -1, 5000}, // redis-cell lets a quantity of 0 pass when nothing remains
		{3000, 1, 0, 2, -1, 3000},
		{3100, 1, 0, 1, -1, 3900},
		{4000, 1, 0, 1, -1, 4000},
		{8000, 1, 0, 4, -1, 1000},
		{9500, 1, 0, 4, -1, 1000},
		{9500, 0, 0, 4, -1, 1000},
		{9500, 2, 0, 2, -1, 3000},
		{9500, 5, 1, 2, 3, 3000},
	} {
		at.set(time.Duration(c.now) * time.Millisecond)
		want := fmt.Sprintf("*5\r\n:%d\r\n:5\r\n:%d\r\n:%d\r\n:%d\r\n", c.limited, c.remaining, c.retry,
			(c.resetMS+999)/1000)
		expect.Equal(t, talk(t, address, send("CL.THROTTLE", "foo", "4", "1", "1", strconv.Itoa(c.quantity))), want,
			"case %d", i)
	}
}

// TestThrottleRounding: what is left of a second counts as a whole one, unless it is less than a millisecond, as in
// redis-cell.
func TestThrottleRounding(t *testing.T) {
	address, _, at := serve(t, nil)
	ask := func(now time.Duration, args ...string) string {
		at.set(now)
		return strings.ReplaceAll(talk(t, address, send(append([]string{"cl.throttle"}, args...)...)), "\r\n", " ")
	}
	for _, c := range []struct {
		now  time.Duration
		args []string
		want string
	}{
		{0, []string{"a", "1", "30", "60"}, "*5 :0 :2 :1 :-1 :2 "},
		{0, []string{"a", "1", "30", "60"}, "*5 :0 :2 :0 :-1 :4 "},
		{time.Second + 1, []string{"a", "1", "30", "60"}, "*5 :1 :2 :0 :1 :3 "},
		// earlier than what has been: taken for that
		{time.Second - 1e6 + 1, []string{"a", "1", "30", "60"}, "*5 :1 :2 :0 :1 :3 "},
		// 0.999 ms count for nothing
		{2*time.Second - 999*time.Microsecond, []string{"a", "1", "30", "60"}, "*5 :1 :2 :0 :0 :2 "},
		{2*time.Second - 1, []string{"a", "1", "30", "60", "2"}, "*5 :1 :2 :0 :2 :2 "},
		// A limit that has become smaller than what is owed: nothing passes, not even nothing.
		{10 * time.Second, []string{"b", "9", "1", "1", "10"}, "*5 :0 :10 :0 :-1 :10 "},
		{10 * time.Second, []string{"b", "3", "1", "1", "0"}, "*5 :1 :4 :0 :6 :10 "},
		{10 * time.Second, []string{"b", "3", "1", "1", "5"}, "*5 :1 :4 :0 :-1 :10 "},
	} {
		expect.Equal(t, ask(c.now, c.args...), c.want, "at %v %v", c.now, c.args)
	}
}

// TestCommands: what is answered, without an access file.
func TestCommands(t *testing.T) {
	address, _, _ := serve(t, nil)
	raw := strings.NewReplacer(`\r`, "\r", `\n`, "\n", `\xff`, "\xff")
	testkit.Table(t, "testdata/commands.txt", func(t *testing.T, in, want string) {
		got := talk(t, address, raw.Replace(in))
		want, more := strings.CutSuffix(raw.Replace(want), "…")
		want, after := strings.CutPrefix(want, "…")
		expect.True(t, got == want || more && strings.HasPrefix(got, want) || after && strings.Contains(got, want),
			"%q", got)
	})
}

// batches is a Service that notes the sizes of batches.
type batches struct {
	Service
	mu    sync.Mutex
	sizes []int
	panic string // the key that makes it panic
}

func (b *batches) CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials,
	results []limit.Result) error {
	b.mu.Lock()
	b.sizes = append(b.sizes, len(checks))
	b.mu.Unlock()
	for i := range checks {
		if b.panic != "" && checks[i].Key == b.panic {
			panic("a mistake")
		}
	}
	return b.Service.CheckTo(ctx, checks, denied, results)
}

// TestPipelined: commands that come together are one batch, in order, also for the same key; what is no check comes in
// its turn.
func TestPipelined(t *testing.T) {
	var b *batches
	address, _, _ := serve(t, func(c *Config) {
		b = &batches{Service: c.Service}
		c.Service = b
	})
	var in, want strings.Builder
	in.WriteString(send("PING"))
	want.WriteString("+PONG\r\n")
	for i := range 50 {
		in.WriteString(send("CL.THROTTLE", "k", "29", "1", "60"))
		if i < 30 {
			fmt.Fprintf(&want, "*5\r\n:0\r\n:30\r\n:%d\r\n:-1\r\n:%d\r\n", 29-i, 60*(i+1))
		} else {
			want.WriteString("*5\r\n:1\r\n:30\r\n:0\r\n:60\r\n:1800\r\n")
		}
		if i == 40 {
			in.WriteString(send("PING", "now") + send("CL.THROTTLE", "k", "x", "1", "60") + send("WEIR.CHECK", "nope",
				"k"))
			want.WriteString("$3\r\nnow\r\n-Cell error: Store error: Couldn't parse as integer: x\r\n" +
				"-ERR policy: there is no policy named nope on the node that decides for this key\r\n")
		}
	}
	expect.Equal(t, talk(t, address, in.String()), want.String())
	// The reads decide how many batches there are: one for what came in the first packet, if it all did.
	expect.True(t, b.sizes[0] >= 2, "batches of %v", b.sizes)
}

// TestManyAtOnce: a burst larger than any buffer and any batch.
func TestManyAtOnce(t *testing.T) {
	address, _, _ := serve(t, nil)
	const n = 5000
	in := strings.Repeat(send("CL.THROTTLE", "many", strconv.Itoa(n-1), "1", "1")+send("PING"), n)
	got := talk(t, address, in)
	if c := strings.Count(got, "+PONG\r\n*5\r\n:0\r\n"); c != n-1 || strings.Count(got, ":-1\r\n:5000\r\n") != 1 {
		t.Errorf("%d answers in order; the end is %q", c, got[max(0, len(got)-100):])
	}
}

// TestPanic: a mistake while commands are carried out ends their connection, and no other.
func TestPanic(t *testing.T) {
	told := make(chan string, 1)
	address, _, _ := serve(t, func(c *Config) {
		c.Service = &batches{Service: c.Service, panic: "bad"}
		c.Panicked = func(name string, p *panics.Error) { told <- fmt.Sprint(name, " ", p.Value) }
	})
	conn := must.Value(net.Dial("tcp", address))(t)
	defer conn.Close()
	must.Value(io.WriteString(conn, send("WEIR.PEEK", "login", "bad")))(t)
	_, err := conn.Read(make([]byte, 1))
	expect.Equal(t, err, io.EOF, "the end")
	expect.Equal(t, <-told, "connection a mistake", "told of")
	got := talk(t, address, send("PING"))
	expect.True(t, got == "+PONG\r\n" && len(told) == 0, "afterwards: %q, told %d times more", got, len(told))
}

// TestPanicOfAConnection: a mistake apart from commands ends its connection, and no other.
func TestPanicOfAConnection(t *testing.T) {
	told := make(chan string, 1)
	var shaken atomic.Bool
	address, _, _ := serve(t, func(c *Config) {
		c.Handshake = func(raw net.Conn) (net.Conn, auth.Credentials, error) {
			if !shaken.Swap(true) {
				panic("a mistake")
			}
			return raw, auth.Credentials{}, nil
		}
		c.Panicked = func(name string, p *panics.Error) { told <- fmt.Sprint(name, " ", p.Value) }
	})
	expect.Equal(t, talk(t, address, ""), "", "answered") // what is sent and not read would reset the connection
	expect.Equal(t, <-told, "connection a mistake", "told of")
	expect.Equal(t, talk(t, address, send("PING")), "+PONG\r\n", "another one")
}

// TestAuthentication: who is not authenticated can do nothing but authenticate; and every command needs its rights.
func TestAuthentication(t *testing.T) {
	var denied []string
	address, _, _ := serve(t, withTokens(t, &denied))
	const (
		noAuth = "-NOAUTH Authentication required.\r\n"
		wrong  = "-WRONGPASS invalid username-password pair or user is disabled.\r\n"
	)
	throttle, check := send("CL.THROTTLE", "k", "9", "1", "1", "0"), send("WEIR.PEEK", "login", "k")
	const passed = "*5\r\n:0\r\n:10\r\n:10\r\n:-1\r\n:0\r\n"
	for _, c := range []struct{ in, want string }{
		{throttle + check + "ECHO a\nINFO\nCLIENT ID\nCOMMAND\nSELECT 0\nPEEK\nECHO\n",
			strings.Repeat(noAuth, 7) +
				"-ERR unknown command 'PEEK', with args beginning with: \r\n-ERR wrong number of arguments for 'echo' command\r\n"},
		{"PING\nRESET\nQUIT\n", "+PONG\r\n+RESET\r\n+OK\r\n"},
		{"HELLO 3\n", "-NOAUTH HELLO must be called…"},
		{"AUTH x\nAUTH web x\nAUTH web\n" + throttle, wrong + wrong + wrong + noAuth},
		{"AUTH secret-of-web\n" + throttle, "+OK\r\n" + passed},
		{"AUTH web secret-of-web\n" + throttle, "+OK\r\n" + passed},
		{"AUTH default secret-of-web\n" + throttle, "+OK\r\n" + passed},
		{"AUTH eye secret-of-web\n" + throttle, wrong + noAuth},
		{"AUTH secret-of-web\nAUTH nonsense\n" + throttle, "+OK\r\n" + wrong + passed},
		{"AUTH secret-of-web\nRESET\n" + throttle, "+OK\r\n+RESET\r\n" + noAuth},
		{"HELLO 2 AUTH web nonsense\n" + throttle, wrong + noAuth},
		{"HELLO 3 AUTH web secret-of-web SETNAME 'a b'\n" + throttle,
			"-ERR Client names cannot contain spaces, newlines or special characters.\r\n" + noAuth},
		{"HELLO 3 AUTH default secret-of-web SETNAME me\nCLIENT GETNAME\n", "%7\r\n…"},
		{"AUTH secret-of-web\nWEIR.CHECK other k\n", "+OK\r\n-NOPERM policy: web may not use the policy…"},
		{"AUTH secret-of-eye\n" + throttle, "+OK\r\n-NOPERM eye does not have the role check\r\n"},
		{"AUTH secret-of-web\nCLIENT INFO\n", "+OK\r\n$…"},
		// What is sent before authentication is bounded, also when the token comes with it.
		{send("AUTH", "secret-of-web") + send("ECHO", strings.Repeat("x", 20_000)), "+OK\r\n$20000\r\n…"},
		{send("ECHO", strings.Repeat("x", 20_000)), "-ERR Protocol error: unauthenticated bulk length\r\n"},
		{"*11\r\n", "-ERR Protocol error: unauthenticated multibulk length\r\n"},
		// So are the commands, which cost the node more than who sends them.
		{strings.Repeat("PING\n", 9000),
			strings.Repeat("+PONG\r\n", 100) + "-NOAUTH too many commands before authentication\r\n"},
		{"AUTH secret-of-web\n" + strings.Repeat("PING\n", 9000), "+OK\r\n" + strings.Repeat("+PONG\r\n", 9000)},
	} {
		got := talk(t, address, c.in)
		want, any := strings.CutSuffix(c.want, "…")
		expect.True(t, (any || got == want) && strings.HasPrefix(got, want), "%.100q: %q", c.in, got)
	}
	expect.True(t, slices.Contains(denied, auth.NoCredentials) && slices.Contains(denied, auth.BadToken) &&
		slices.Contains(denied, auth.WrongRole) && slices.Contains(denied, auth.WrongPolicy), "told: %v", denied)
}

// TestWebPage: a request of a browser that somebody's page had it send is not taken for commands.
func TestWebPage(t *testing.T) {
	told := make(chan net.Addr, 1)
	address, _, _ := serve(t, func(c *Config) { c.Suspicious = func(from net.Addr) { told <- from } })
	expect.Equal(t, talk(t, address, "POST / HTTP/1.1\r\nHost: localhost\r\n\r\nWEIR.CHECK login page\r\n"), "")
	<-told
	got := talk(t, address, send("WEIR.PEEK", "login", "page"))
	expect.True(t, strings.Contains(got, "remaining\r\n:2\r\n"), "it was charged: %q", got)
}

// TestTimeouts: a command that does not come to its end, a stranger who says nothing and a caller who does not for long
// are let go.
func TestTimeouts(t *testing.T) {
	address, _, _ := serve(t, func(c *Config) { c.CommandTimeout = 20 * time.Millisecond })
	for _, in := range []string{"", "*1\r\n$4\r\nPI"} {
		conn := must.Value(net.Dial("tcp", address))(t)
		_, _ = io.WriteString(conn, in) // the read tells
		out, err := io.ReadAll(conn)
		expect.True(t, err == nil && len(out) == 0, "%q: %q, %v", in, out, err)
		conn.Close()
	}
	// It is the whole command that has the time, not each piece of it.
	drip := must.Value(net.Dial("tcp", address))(t)
	defer drip.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, drip) // until it is ended
	}()
	for dripping := true; dripping; {
		_, _ = io.WriteString(drip, "x") // likewise
		select {
		case <-ended:
			dripping = false
		case <-time.After(time.Millisecond):
		}
	}
	address, _, _ = serve(t, func(c *Config) { c.IdleTimeout = 20 * time.Millisecond })
	conn := must.Value(net.Dial("tcp", address))(t)
	defer conn.Close()
	_, _ = io.WriteString(conn, "PING\n") // likewise
	out, err := io.ReadAll(conn)
	expect.True(t, err == nil && string(out) == "+PONG\r\n", "idle: %q, %v", out, err)
}

// TestShutdown: what has come is answered, and nothing that was read is lost; idle connections end at once.
func TestShutdown(t *testing.T) {
	address, s, _ := serve(t, nil)
	idle := must.Value(net.Dial("tcp", address))(t)
	defer idle.Close()
	busy := must.Value(net.Dial("tcp", address))(t)
	defer busy.Close()
	r := bufio.NewReader(busy)
	sent := make(chan int)
	stop := make(chan struct{})
	go func() {
		n := 0
		defer func() { sent <- n }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := io.WriteString(busy, send("PING")); err != nil {
				return
			}
			n++
		}
	}()
	_, err := r.ReadString('\n')
	must.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	done := make(chan error)
	go func() { done <- s.Shutdown(ctx) }()
	// The caller who never stops has a second; then it is told that nothing more comes.
	answered := 1
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			expect.True(t, err == io.EOF || strings.Contains(err.Error(), "reset"), "%v", err)
			break
		}
		must.Equal(t, line, "+PONG\r\n")
		answered++
	}
	close(stop)
	busy.Close()
	n := <-sent
	expect.True(t, answered <= n, "%d answers to %d commands", answered, n)
	out, err := io.ReadAll(idle)
	expect.True(t, err == nil && len(out) == 0, "idle: %q, %v", out, err)
	expect.NoError(t, <-done)
}

// stuck is a Service that lets nobody go before it is told.
type stuck struct {
	Service
	began, end chan struct{}
}

func (s *stuck) CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials, results []limit.Result) error {
	s.began <- struct{}{}
	<-s.end
	return s.Service.CheckTo(ctx, checks, denied, results)
}

// TestShutdownAnswers: a command that is being decided when the server is told to stop is answered.
func TestShutdownAnswers(t *testing.T) {
	held := &stuck{began: make(chan struct{}), end: make(chan struct{})}
	address, s, _ := serve(t, func(c *Config) {
		held.Service = c.Service
		c.Service = held
	})
	conn := must.Value(net.Dial("tcp", address))(t)
	defer conn.Close()
	_, _ = io.WriteString(conn, send("CL.THROTTLE", "a", "1", "1", "1")) // the answer tells
	<-held.began
	done := make(chan error)
	go func() { done <- s.Shutdown(context.Background()) }()
	close(held.end)
	out, err := io.ReadAll(conn)
	expect.True(t, err == nil && string(out) == "*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:1\r\n", "%q, %v", out, err)
	expect.NoError(t, <-done)
}

// TestOnError: a key whose owner cannot be asked is admitted, or answered with an error that asks to try again, as
// on_error says.
func TestOnError(t *testing.T) {
	for _, c := range []struct {
		answer          limit.Result
		throttle, check string
	}{
		{limit.Result{Decision: limit.Decision{FailedClosed: true, RetryAfter: time.Second}}, "-TRYAGAIN the node…",
			"-TRYAGAIN the node…"},
		{limit.Result{Err: limit.NewError(limit.Unavailable, "", "gone")}, "-TRYAGAIN gone\r\n", "-TRYAGAIN gone\r\n"},
		{limit.Result{Err: context.DeadlineExceeded}, "-TRYAGAIN …", "-TRYAGAIN …"},
		{limit.Result{Decision: limit.Decision{FailedOpen: true, Allowed: true}},
			"*5\r\n:0\r\n:6\r\n:0\r\n:-1\r\n:0\r\n", "*22\r\n$7\r\nallowed\r\n:1\r\n…"},
	} {
		address, _, _ := serve(t,
			func(cfg *Config) { cfg.Service = &scripted.Service{Results: []limit.Result{c.answer}} })
		for in, w := range map[string]string{send("CL.THROTTLE", "a", "5", "1", "1"): c.throttle,
			send("WEIR.CHECK", "p", "a"): c.check} {
			got := talk(t, address, in)
			want, any := strings.CutSuffix(w, "…")
			expect.True(t, (any || got == want) && strings.HasPrefix(got, want), "%+v: %q", c.answer, got)
		}
	}
}

// TestTLS: a handshake that fails ends the connection, one that succeeds has the commands read.
func TestTLS(t *testing.T) {
	address, _, _ := serve(t, func(c *Config) {
		pair := certstest.NewAuthority(t, "a").Pair(certstest.Leaf{DNS: []string{"localhost"}})
		c.Handshake = func(raw net.Conn) (net.Conn, auth.Credentials, error) {
			conn := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{pair}})
			err := conn.Handshake()
			state := conn.ConnectionState()
			return conn, auth.Credentials{TLS: &state, From: raw.RemoteAddr()}, err
		}
	})
	expect.Equal(t, talk(t, address, ""), "")
	// what is tried is not whose certificate it is
	conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
	must.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, send("ECHO", "a")+"QUIT\n")
	must.NoError(t, err)
	out, err := io.ReadAll(conn)
	expect.True(t, err == nil && string(out) == "$1\r\na\r\n+OK\r\n", "%q, %v", out, err)
}

// TestLikeRedis: what Redis answers to commands that it has, too, is answered here.
func TestLikeRedis(t *testing.T) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		t.Skip("redis-server is not installed (Debian: redis-server)")
	}
	for _, password := range []string{"", "secret-of-web"} {
		l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
		redis := l.Addr().String()
		l.Close()
		_, port, _ := net.SplitHostPort(redis)
		args := []string{"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir",
			t.TempDir()}
		var edit func(*Config)
		if password != "" {
			args, edit = append(args, "--requirepass", password), withTokens(t, nil)
		}
		cmd := exec.Command(path, args...)
		must.NoError(t, cmd.Start())
		defer func() {
			_ = cmd.Process.Signal(os.Interrupt) // Wait tells
			_ = cmd.Wait()                       // by a signal
		}()
		testkit.Eventually(t, "Redis to listen", func() bool {
			c, err := net.Dial("tcp", redis)
			if err == nil {
				c.Close()
			}
			return err == nil
		})
		address, _, _ := serve(t, edit)
		for _, in := range []string{
			"ECHO a\n", "ECHO\n", "PING a b\n", "SELECT 0\n", "NOPE\n", "NOPE a b\n",
			send("NOPE", strings.Repeat("x", 200), "y"), "CLIENT GETNAME\n",
			"AUTH nonsense\n", "AUTH default nonsense\n", "AUTH nobody secret\n",
			"AUTH default secret-of-web\nECHO a\n", "AUTH\n", "AUTH a b c\n",
			"HELLO 4\n", "HELLO x\n", "HELLO 2 NOPE\n", "HELLO 2 AUTH nobody x\n",
			"CLIENT SETNAME me\nCLIENT GETNAME\n", send("CLIENT", "SETNAME", "a b"), "CLIENT NOPE\n",
			"CLIENT ID x\n", "SELECT 99\n", "RESET\n", "QUIT\n", "RESET a\n", "COMMAND NOPE\n", "COMMAND INFO nope\n",
			"COMMAND COUNT x\n", "\r\n\r\n", "*0\r\n*-1\r\nECHO a\n",
			"*1\r\n*1\r\n", "*x\r\n", "*1\r\n$x\r\n", "*1\r\n$-1\r\n", "a \"b\n", "ECHO 'it\\'s'\n",
			`ECHO "\x41\n"` + "\n", "*1025000000000\r\n", "*1\r\n$9999999999999\r\n",
			"CLIENT SETNAME a\nRESET\nCLIENT GETNAME\n", "POST / HTTP/1.1\r\nPING\r\n",
		} {
			if password != "" && (strings.Contains(in, " NOPE") || in == "PING a b\n" || in == "CLIENT ID x\n" ||
				in == "COMMAND COUNT x\n") {
				continue // who is not authenticated is not told of subcommands here; and may send PING, as probes do
			}
			theirs, ours := talk(t, redis, in), talk(t, address, in)
			expect.True(t, ours == theirs, "%q: Redis answers %q, Weir %q", in, theirs, ours)
		}
	}
}

// BenchmarkThrottle: pipelined commands of one connection, 100 at a time, in the same process.
func BenchmarkThrottle(b *testing.B) {
	address, _, _ := serve(b, nil)
	conn := must.Value(net.Dial("tcp", address))(b)
	defer conn.Close()
	const batch = 100
	in := []byte(strings.Repeat(send("CL.THROTTLE", "user:12345", "999", "1000", "60"), batch))
	r := bufio.NewReaderSize(conn, 1<<16)
	b.ReportAllocs()
	for range (b.N + batch - 1) / batch {
		_, err := conn.Write(in)
		must.NoError(b, err)
		for range 6 * batch {
			_, err := r.ReadSlice('\n')
			must.NoError(b, err)
		}
	}
}

// TestIdleBuffer: a connection that has sent much and says nothing has a small buffer again, and goes on.
func TestIdleBuffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		defer here.Close()
		defer there.Close()
		c := newConn(New(Config{}), there)
		c.buf = make([]byte, knownBounds.size)
		go func() {
			time.Sleep(keepBuffer / 2)
			_, _ = here.Write([]byte("PING\r\n"))
			time.Sleep(time.Hour)
			_, _ = here.Write([]byte("ECHO a\r\n"))
		}()
		must.NoError(t, c.fill())
		expect.Equal(t, len(c.buf), knownBounds.size, "bytes soon")
		c.from = c.to
		must.NoError(t, c.fill())
		expect.Equal(t, len(c.buf), firstBuffer, "bytes after an hour")
		expect.Equal(t, string(c.buf[:c.to]), "ECHO a\r\n", "what is read")
	})
}
