package cluster
import ("testing";"fmt";"time";"os";"strconv")
func TestTmpMany(t *testing.T){
 n,_:=strconv.Atoi(os.Getenv("N"))
 mk:=func(c Config)Config{c.ProbeInterval=0;c.Settle=0;c.SeedTimeout=0;c.RejoinInterval=0;return c}
 nodes:=[]testNode{startNode(t,mk(config("n0")))}
 s:=time.Now()
 for i:=1;i<n;i++{ nodes=append(nodes,startNode(t,mk(config(fmt.Sprintf("n%d",i),nodes[0].gossip()))))}
 agree(t,nodes...)
 t.Log("formed", time.Since(s))
 for range 3 {
 v:=nodes[len(nodes)-1]; nodes=nodes[:len(nodes)-1]
 s=time.Now(); v.crash()
 waitFor(t,"first",func() bool {return nodes[0].View().Member(v.View().Self.Name)==nil})
 f:=time.Since(s)
 agree(t,nodes...)
 t.Log("first", f, "all", time.Since(s))
 }
 for _,x:=range nodes { go x.crash() }
 time.Sleep(2*time.Second)
}
